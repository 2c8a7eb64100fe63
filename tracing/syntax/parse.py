"""Reads a graph back from the text that `text` gives it.

A value must be defined above its use, and every value once. An attribute without a text form comes back as `Opaque`:
such a graph can be read, compared, changed by passes and printed, and its other nodes run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from dflow.tracing.errors import ParseError
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.explicit_sharding import TEXT
from dflow.tracing.ir.graph import Graph, Literal, Node, Operand, Value, Written
from dflow.tracing.ir.op import OPS, OpDef, numeric
from dflow.tracing.ir.types import ArrayType, Type, parse_type
from dflow.tracing.jaxprs.attributes import Body, Opaque, Record, Symbol, restored
from dflow.tracing.source import Loc

T = TypeVar("T")

_BLANK = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"%([\w./]+)")
_TYPE = re.compile(rf"ref<[^\[>]*(?:<\w+>)?{TEXT}>|(?:queue|accumulator)<[^<>\n]*>|token\b|~?[a-z]\w*(?:<\w+>)?{TEXT}")
_DEVICE = re.compile(r"@([\w:/-]+)")
_LOC = re.compile(r"[ \t]*#[ \t]*([^\n]*\S):(\d+)[ \t]*(?=\n|$)")
_KEY = re.compile(r"([A-Za-z_]\w*)=")
_SYMBOL = re.compile(r"[A-Za-z_][\w.-]*(?:<\w+>)?")
_REAL = r"(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf|nan)"
_NUMBER = re.compile(rf"[+-]?{_REAL}(?:[+-]{_REAL}j)?(?![\w.])")
_OPAQUE = re.compile(r"<[^<>\n]*>")
_OF_TYPE = re.compile(r":(?=~?[a-z]\w*(?:<\w+>)?\[)")
_OP = re.compile(r"([a-z][\w-]*(?:\.[\w-]+)+)\(")
_BOOLS = {"True": True, "False": False}
_BOOL = re.compile(r"(?:True|False)(?![\w.])")
_STRING = re.compile('"')
_ARRAY = re.compile(r"\[([^\[\]\"{}()]*)\]:(?=~?[a-z]\w*(?:<\w+>)?\[)")
_BODY = re.compile(r"(?:open )?graph\(")
_OPEN = re.compile("open ")
_ATTRIBUTES = re.compile(r"\{\s*[A-Za-z_]\w*=")
_JSON = json.JSONDecoder()
_MARKS = {
    True: "has no effects; its line may not start with '!'",
    False: "has effects; its line must start with '!'",
}


def parse(text: str) -> Graph:
    """The graph that `text` describes. Raises ParseError with line and column, what is there and what should be."""
    reader = _Reader(text)
    graph, constants = reader.graph()
    if constants:
        reader.fail("only a body inside a node may have inputs with a value; this graph has")
    reader.end()
    return graph


class _Reader:
    """Reads graphs from a text: its methods consume what is at the current position, or raise ParseError.

    It holds the values of the graph it is in, by name.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._ended = self._at = 0
        self._values: dict[str, Value] = {}
        self._to(0)

    def fail(self, fact: str, found: re.Match[str] | None = None) -> NoReturn:
        """Raise ParseError for the position where `found` begins, or for the current one."""
        at = self._at if found is None else found.start()
        before = self._text[:at]
        line, column = before.count("\n") + 1, at - before.rfind("\n")
        raise ParseError(f"line {line}, column {column}: {fact}")

    def expected(self, what: str) -> NoReturn:
        """Raise ParseError that says what should stand at the current position."""
        rest = self._text[self._at :].split("\n")[0]
        found = repr(rest[:30] + ("..." if len(rest) > 30 else "")) if rest else "the end"
        self.fail(f"expected {what}, found {found}")

    def look(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The match of `pattern` here, if any; takes nothing."""
        return pattern.match(self._text, self._at)

    def match(self, pattern: re.Pattern[str], *, glued: bool = False) -> re.Match[str] | None:
        """Take what `pattern` matches here (if `glued`, right where the last token ended), and the blanks after it."""
        found = pattern.match(self._text, self._ended if glued else self._at)
        if found is not None:
            self._to(found.end())
        return found

    def take(self, token: str) -> bool:
        """Take `token` if it is here."""
        if not self._text.startswith(token, self._at):
            return False
        self._to(self._at + len(token))
        return True

    def need(self, token: str) -> None:
        """Take `token`, which must be here."""
        if not self.take(token):
            self.expected(repr(token))

    def sequence(self, close: str, item: Callable[[], T]) -> list[T]:
        """Items with commas between them (one may follow the last), up to the token `close`."""
        items: list[T] = []
        while not self.take(close):
            items.append(item())
            if not self.take(","):
                self.need(close)
                break
        return items

    def string(self) -> str:
        """Take a string in double quotes, as JSON writes it."""
        try:
            value, end = _JSON.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            self.fail(f"this string does not end or has a wrong escape: {error.msg}")
        self._to(end)
        return str(value)

    def end(self) -> None:
        """Raise ParseError unless only blanks follow."""
        if self._at != len(self._text):
            self.expected("the end")

    def _to(self, end: int) -> None:
        self._ended = end
        blank = _BLANK.match(self._text, end)
        self._at = blank.end() if blank else end

    def graph(self) -> tuple[Graph, tuple[Any, ...]]:
        """A graph, and the values of its first inputs where it is a body that closes over them."""
        outer, self._values = self._values, {}
        self.need("graph(")
        inputs = self.sequence(")", self._input)
        self.need("{")
        nodes: list[Node] = []
        while not self.take("return"):
            nodes.append(self._node())
        outputs = self.sequence("}", self._operand)
        self._values = outer
        constants = tuple(restored(constant) for _, given in inputs for constant in given)
        return Graph(tuple(value for value, _ in inputs), tuple(nodes), tuple(outputs)), constants

    def _input(self) -> tuple[Value, list[Any]]:
        value = self._definition()
        return value, [self._data()] if self.take("=") else []

    def _definition(self) -> Value:
        found = self._name()
        name = found[1]
        if name in self._values:
            self.fail(f"%{name} is defined twice; a value is defined once", found)
        self.need(":")
        self._values[name] = Value(name, self._type(), self._device())
        return self._values[name]

    def _name(self) -> re.Match[str]:
        return self.match(_NAME) or self.expected("a value such as %x")

    def _known(self) -> Value:
        found = self._name()
        if found[1] not in self._values:
            self.fail(f"%{found[1]} is not defined above; a value is defined before it is used", found)
        return self._values[found[1]]

    def _type(self) -> Type:
        found = self.match(_TYPE) or self.expected("a type such as f32[2,3], ref<f32[3]> or token")
        try:
            return parse_type(found[0])
        except ParseError as error:
            self.fail(str(error), found)

    def _device(self) -> str | None:
        found = self.match(_DEVICE)
        return found[1] if found else None

    def _operand(self) -> Operand:
        if self.look(_NAME):
            return self._known()
        word = self.match(_NUMBER) or self.match(_BOOL) or self.expected("a value such as %x, or 2.0:f32[]")
        type = self._glued_type() or self.expected("a type after the literal, as in 2.0:f32[]")
        array = _array([word[0]], type)
        return Literal(array.item() if type.weak else array[()], type)

    def _node(self) -> Node:
        has_effects = self.take("!")
        outputs = [self._definition()]
        while self.take(","):
            outputs.append(self._definition())
        self.need("=")
        op = self._op(has_effects)
        inputs = self.sequence(")", self._operand)
        attributes, bodies = self._attributes(), self._own_bodies()
        device = self._device()
        after = self.sequence(")", self._known) if self.take("after(") else []
        node = Node(op, tuple(inputs), tuple(outputs), attributes, bodies, device, tuple(after), Written(self._loc()))
        if node.has_effects != has_effects:
            self.fail(f"the node before, %{outputs[0].name} ({op.name}), {_MARKS[has_effects]}")
        return node

    def _op(self, has_effects: bool) -> OpDef:
        found = self.match(_OP) or self.expected("an op such as jax.add( or var.read(")
        name = found[1]
        if not name.startswith("jax.") and name not in OPS:
            self.fail(f"{name!r} is not an op; an op is jax.<primitive> or one of {', '.join(sorted(OPS))}", found)
        if name in OPS:
            return OPS[name]
        primitive = restored(Symbol(name))
        if isinstance(primitive, Opaque):
            return OpDef(name, None, ((Effect.UNKNOWN, None),) if has_effects else ())
        return numeric(primitive, unknown_effects=has_effects)

    def _attributes(self) -> dict[str, Any]:
        if not self.look(_ATTRIBUTES):
            return {}
        self.need("{")
        return dict(self.sequence("}", self._attribute))

    def _attribute(self) -> tuple[str, Any]:
        key = self.match(_KEY) or self.expected("an attribute such as axis=0")
        try:
            return key[1], restored(self._data())
        except TypeError as error:
            self.fail(f"attribute {key[1]!r} cannot be made: {error}")

    def _own_bodies(self) -> tuple[Graph, ...]:
        bodies: list[Graph] = []
        if self.take("{"):
            while not bodies or not self.take("}"):
                graph, _ = self.graph()
                bodies.append(graph)
        return tuple(bodies)

    def _loc(self) -> Loc | None:
        found = self.match(_LOC, glued=True)
        return Loc(found[1], int(found[2])) if found else None

    def _data(self) -> Any:
        """Plain data, as `attributes.normal` gives it."""
        if self.look(_STRING):
            return self.string()
        if self.take("("):
            return tuple(self.sequence(")", self._data))
        if self.take("{"):
            return dict(self.sequence("}", self._item))
        if self.look(_BODY):
            return self._body()
        if self.look(_TYPE):
            return self._type()
        if found := self.match(_OPAQUE):
            return Opaque(found[0])
        if found := self.match(_ARRAY):
            return _array(re.findall(r"[^\s,]+", found[1]), self._array_type())
        return self.sequence("]", self._data) if self.take("[") else self._word()

    def _item(self) -> tuple[Any, Any]:
        key = self._data()
        self.need(":")
        return key, self._data()

    def _body(self) -> Body:
        is_open = self.match(_OPEN) is not None
        graph, constants = self.graph()
        return Body(graph, constants, is_open)

    def _word(self) -> Any:
        word = self.match(_NUMBER) or self.match(_BOOL)
        if word is None:
            return self._symbol()
        type = self._glued_type()
        return _number(word[0]) if type is None else _array([word[0]], type)

    def _glued_type(self) -> ArrayType | None:
        return self._array_type() if self.match(_OF_TYPE, glued=True) else None

    def _array_type(self) -> ArrayType:
        type = self._type()
        assert isinstance(type, ArrayType)
        return type

    def _symbol(self) -> Any:
        found = self.match(_SYMBOL) or self.expected("an attribute's value")
        if found[0] == "None":
            return None
        if self.take("("):
            return Record(found[0], tuple(self.sequence(")", self._field)))
        return Symbol(found[0])

    def _field(self) -> tuple[str, Any]:
        key = self.match(_KEY) or self.expected("a field such as axis=0")
        return key[1], self._data()


def _number(word: str) -> Any:
    if word in _BOOLS:
        return _BOOLS[word]
    if word.endswith("j"):
        return complex(word)
    return int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word)


def _array(words: list[str], type: ArrayType) -> np.ndarray[Any, Any]:
    return np.array([_number(word) for word in words]).astype(type.dtype).reshape(type.shape)
