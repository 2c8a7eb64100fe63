"""A node's attributes as plain data, which can be written as text, read back and bound again.

A numeric node holds its primitive's params in JAX's form. `normal` converts a param to plain data: numbers, text,
tuples, `Symbol` (a dtype, an enum's member, a primitive), `Record` (named fields), `Body` (a jaxpr, as a graph), and
`Opaque` for an object without a text form, such as a function. `restored` is its inverse. It leaves a `Body` as it is,
because a new jaxpr would lose the user's lines; `bind_node` takes attributes in either form.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit
from jax.extend.core import Primitive

from dflow.tracing.errors import DflowError
from dflow.tracing.ir.graph import Graph, Literal, Node, Value
from dflow.tracing.ir.types import DTYPES, ArrayType, Type, dtype_name, parse_dtype
from dflow.tracing.jax_frontend import (
    bind,
    closed_parts,
    is_jaxpr,
    is_key_implementation,
    is_open,
    key_implementation,
    make_jaxpr,
    primitives_by_name,
    scan_counts,
)
from dflow.tracing.jaxprs.from_jaxpr import graph_of
from dflow.tracing.primitives.kernel_choice import Choice
from dflow.tracing.source import at

#: Arrays of more elements than this are printed as a digest of their bytes, which cannot be read back.
LARGEST_PRINTED = 16


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object without a text form, which prints as `text`. A node that has one can be read, not run."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of an object of JAX: `f32`, `GatherScatterMode.CLIP`, `jax.add`, `prng.fry`."""

    name: str


@dataclass(frozen=True, slots=True)
class Record:
    """A named tuple or dataclass, by its class's name."""

    name: str
    fields: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"a {self.name}"


@dataclass(frozen=True, eq=False)
class Body:
    """A jaxpr as a graph whose first inputs hold `constants`. `is_open`: JAX keeps it as one without constants."""

    graph: Graph
    constants: tuple[Any, ...] = ()
    is_open: bool = False


_CLASSES: Mapping[str, Any] = {
    name: member
    for name, member in vars(jax.lax).items()
    if isinstance(member, type) and (issubclass(member, Enum) or hasattr(member, "_fields") or is_dataclass(member))
} | {jax.memory.Space.__name__: jax.memory.Space}

_PLAIN = (NoneType, bool, int, float, complex, str, *get_args(Type), Opaque, Symbol, Record, Body)


def normal(value: Any) -> Any:
    """The attribute `value` as plain data; never fails."""
    if isinstance(value, Enum):
        return Symbol(f"{type(value).__name__}.{value.name}")
    if type(value) in _PLAIN:
        return value
    if is_key_implementation(value):
        return Symbol(f"prng.{value.tag}")
    if hasattr(value, "_fields"):
        return _record(value, value._fields)
    if isinstance(value, (tuple, list)):
        return type(value)(normal(item) for item in value)
    if isinstance(value, dict):
        return {normal(key): normal(item) for key, item in value.items()}
    if is_jaxpr(value):
        return body_of(value)
    return _normal_leaf(value)


def _normal_leaf(value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        return Opaque(f"<tracer {jax.typeof(value)}>")
    if _is_dtype(value):
        return Symbol(dtype_name(value))
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return _normal_array(value)
    if isinstance(value, Primitive):
        return Symbol(f"jax.{value.name}")
    if isinstance(value, Choice):
        return {platform: Opaque(f"<{label}>") for platform, label in value.labels().items()}
    if is_dataclass(value) and type(value).__name__ in _CLASSES:
        return _record(value, [field.name for field in fields(value)])
    return Opaque(f"<{_description(value)}>")


def _is_dtype(value: Any) -> bool:
    if isinstance(value, type):
        return issubclass(value, np.generic) and np.dtype(value).name != "object"
    kind = getattr(value, "type", None)
    is_key = isinstance(kind, type) and issubclass(kind, jax.dtypes.extended)
    return isinstance(value, np.dtype) or (is_key and not hasattr(value, "shape"))


def _normal_array(value: Any) -> Any:
    type = ArrayType(value.dtype, tuple(value.shape))
    if jnp.issubdtype(value.dtype, jax.dtypes.extended) or dtype_name(value.dtype) not in DTYPES:
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        if not is_key or (isinstance(value, jax.Array) and not value.is_fully_addressable):
            return Opaque(f"<array {type}>")
        return Opaque(f"<array {type} {_digest(np.asarray(jax.random.key_data(value)).tobytes())}>")
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return Opaque(f"<array {type}>")
    array = np.asarray(value)
    if array.shape == () and array.dtype == np.int64:
        return int(array)
    if array.size > LARGEST_PRINTED:
        return Opaque(f"<array {type} {_digest(array.tobytes())}>")
    return array


def _record(value: Any, names: Sequence[str]) -> Record:
    return Record(type(value).__name__, tuple((name, normal(getattr(value, name))) for name in names))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _description(value: Any) -> str:
    """A short text that is the same in every process: a function's name, or a `repr` without addresses."""
    if isinstance(value, frozenset | set):  # its order is another in each process
        return f"{type(value).__name__}({', '.join(sorted(map(_description, value)))})"
    name = getattr(value, "__qualname__", None) if callable(value) else None
    described = f"function {name}" if isinstance(name, str) else repr_of(value)
    if " at 0x" in described or "\n" in described or len(described) > 80:
        is_sharding = isinstance(value, jax.sharding.Sharding)
        described = f"{type(value).__name__} {_digest(described.encode())}" if is_sharding else type(value).__name__
    return re.sub(r"[<>]", "", described)


def repr_of(value: Any) -> str:
    """The `repr` of a value of the user's, or the name of its class if `repr` raises."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


_bodies: WeakKeyDictionary[Any, Body | Opaque] = WeakKeyDictionary()


def body_of(jaxpr: Any) -> Body | Opaque:
    """A jaxpr as a graph; Opaque for one that holds more than arrays."""
    if jaxpr not in _bodies:
        _bodies[jaxpr] = _body_of(jaxpr)
    return _bodies[jaxpr]


def _body_of(jaxpr: Any) -> Body | Opaque:
    inner, consts = closed_parts(jaxpr)
    atoms = [*inner.constvars, *inner.invars, *(var for equation in inner.eqns for var in equation.outvars)]
    if len(consts) != len(inner.constvars) or not all(hasattr(atom.aval, "dtype") for atom in atoms):
        return Opaque("<jaxpr>")
    graph, _, constants = graph_of(inner, consts, [_argument_name(index) for index in range(len(inner.invars))])
    return Body(graph, constants, is_open(jaxpr))


def _argument_name(index: int) -> str:
    turn, letter = divmod(index, 26)
    return string.ascii_lowercase[letter] + (f"_{turn}" if turn else "")


def attributes_of(node: Node) -> dict[str, Any]:
    """A node's attributes as plain data, as they print. Those of a `jit` that have their default are left out."""
    attributes = dict(node.attributes)
    if node.op.name == "jax.scan" and "ft_in" in attributes:
        attributes["num_consts"], attributes["num_carry"] = scan_counts(attributes)
        del attributes["ft_in"], attributes["ft_out"]
    if node.op.name in ("jax.jit", "jax.pjit"):
        defaults = _jit_defaults(len(node.inputs), len(node.array_outputs))
        attributes = {key: value for key, value in attributes.items() if key not in defaults or value != defaults[key]}
    return {key: normal(value) for key, value in attributes.items()}


@cache
def _jit_defaults(inputs: int, outputs: int) -> Mapping[str, Any]:
    """The params of a `jit` that was given no options."""
    with jax.default_device(None):
        jaxpr, _, _ = make_jaxpr(jax_jit(lambda x: -x), 0.0)
    repeats = {"in": inputs, "donated": inputs, "out": outputs}
    return {
        key: value * repeats.get(key.split("_")[0], 1) if isinstance(value, tuple) else value
        for key, value in jaxpr.eqns[0].params.items()
        if key not in ("jaxpr", "name")
    }


def restored(value: Any) -> Any:
    """The inverse of `normal`; a value that cannot be rebuilt stays an Opaque, a Record or a Body."""
    if isinstance(value, Symbol):
        return _restored_symbol(value.name)
    if isinstance(value, Record):
        return _restored_record(value)
    if isinstance(value, (tuple, list)):
        return type(value)(restored(item) for item in value)
    if isinstance(value, dict):
        return {restored(key): restored(item) for key, item in value.items()}
    return value


def _restored_symbol(name: str) -> Any:
    family, _, member = name.partition(".")
    if name in DTYPES or name.startswith("key<"):
        return parse_dtype(name)
    if family == "prng":
        return key_implementation(parse_dtype(f"key<{member}>"))
    if family == "jax" and member in primitives_by_name():
        return primitives_by_name()[member]
    enum = _CLASSES.get(family)
    if enum is not None and issubclass(enum, Enum) and member in enum.__members__:
        return enum[member]
    return Opaque(name)


def _restored_record(record: Record) -> Any:
    values = {name: restored(value) for name, value in record.fields}
    if record.name in _CLASSES:
        return _CLASSES[record.name](**values)
    return Record(record.name, tuple(values.items()))


def opaque_in(value: Any) -> Opaque | Record | None:
    """The first part of a restored attribute that `restored` could not rebuild, or None."""
    if isinstance(value, (Opaque, Record)):
        return value
    if isinstance(value, Body):
        value = value.constants
    if isinstance(value, dict):
        value = tuple(value.values())
    parts = value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := opaque_in(part)) is not None), None)


def opaque_attribute(node: Node) -> tuple[str, Opaque | Record] | None:
    """The name and the part of the first attribute that `restored` could not rebuild; None when the node can run."""
    for key, value in node.attributes.items():
        if (found := opaque_in(value)) is not None:
            return key, found
    return None


def bind_node(node: Node, operands: Sequence[Any]) -> list[Any]:
    """Apply a numeric node to values in the trace that runs now.

    Raises DflowError when the node was read from text that could not carry one of its attributes.
    """
    if has_body_rule(node):
        return _BOUND_BY_BODY[node.op.name](node, list(operands))
    found = opaque_attribute(node)
    if found is not None or node.op.primitive is None:
        raise DflowError(_cannot_run(node, found))
    params = {key: _jax_param(value) for key, value in node.attributes.items()}
    return bind(node.op.primitive, params, operands, node.origin)


def has_body_rule(node: Node) -> bool:
    """Whether a node read from text runs by its body alone, whatever else the text did not carry."""
    return node.op.name in _BOUND_BY_BODY and any(isinstance(value, Body) for value in node.attributes.values())


def _cannot_run(node: Node, found: tuple[str, Opaque | Record] | None) -> str:
    first = f"node %{node.outputs[0].name} ({node.op.name}) cannot run: "
    if found is None:
        return f"{first}this JAX has no such primitive{at(node.loc)}"
    key, value = found
    return (
        f"{first}its attribute {key!r} is {value}, which the text of a graph does not carry{at(node.loc)}\n"
        "  trace the function again instead of reading its text"
    )


def _jax_param(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_jax_param(item) for item in value)
    return jaxpr_of(value) if isinstance(value, Body) else value


def jaxpr_of(body: Body) -> Any:
    """The jaxpr of a body, as JAX's params hold it."""
    types = [value.type for value in body.graph.inputs[len(body.constants) :]]
    structs = [type.struct for type in types if isinstance(type, ArrayType)]
    closed = jax.make_jaxpr(lambda *operands: evaluate(body, operands))(*structs)
    return closed.jaxpr if body.is_open else closed


def evaluate(body: Body, operands: Sequence[Any]) -> list[Any]:
    """Apply a body, which has no state, to values in the current trace."""
    graph = body.graph
    if (found := opaque_in(body)) is not None:
        raise DflowError(f"a body closes over {found}, which the text of a graph does not carry")
    env: dict[Value, Any] = dict(zip(graph.inputs, (*body.constants, *operands), strict=True))

    def value(operand: Value | Literal) -> Any:
        return operand.value if isinstance(operand, Literal) else env[operand]

    for node in graph.nodes:
        results = bind_node(node, [value(operand) for operand in node.inputs])
        env.update(zip(node.array_outputs, results, strict=True))
    return [value(operand) for operand in graph.outputs]


def _by_body(key: str) -> Callable[[Node, list[Any]], list[Any]]:
    return lambda node, operands: evaluate(node.attributes[key], operands)


def _jit(node: Node, operands: list[Any]) -> list[Any]:
    body: Body = node.attributes["jaxpr"]
    return list(jax_jit(lambda *values: evaluate(body, values))(*operands))


def _scan(node: Node, operands: list[Any]) -> list[Any]:
    attributes = node.attributes
    consts = operands[: attributes["num_consts"]]
    rest = operands[len(consts) :]
    init, xs = rest[: attributes["num_carry"]], rest[attributes["num_carry"] :]

    def step(carry: Any, x: Any) -> Any:
        results = evaluate(attributes["jaxpr"], [*consts, *carry, *x])
        return results[: len(init)], results[len(init) :]

    options = {key: attributes[key] for key in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, init, xs, **options)
    return [*carry, *ys]


#: Read from text, these ops are bound through JAX's public functions, or by their body when only gradients, which
#: were taken before there was a graph, would tell the difference.
_BOUND_BY_BODY: Mapping[str, Callable[[Node, list[Any]], list[Any]]] = {
    "jax.jit": _jit,
    "jax.pjit": _jit,
    "jax.scan": _scan,
    "jax.closed_call": _by_body("call_jaxpr"),
    "jax.custom_jvp_call": _by_body("call_jaxpr"),
    "jax.custom_vjp_call": _by_body("call_jaxpr"),
    "jax.remat2": _by_body("jaxpr"),
    "jax.checkpoint": _by_body("jaxpr"),
}
