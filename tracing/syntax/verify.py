"""Check that a graph is well formed. Every pass may assume these rules, and must keep them.

- Each value is defined once, before its use, under a name no other value of the graph has.
- Each op accepts the types of its operands, and its results have the types its rule gives. A node read from text
  that could not carry one of its attributes is trusted.
- Each effect on a variable is on an input of the graph; what a node comes `after` is defined before it.
- The bodies of a node are well formed, take what the node hands them, and give what the node's op wants of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

from dflow.tracing.errors import DflowError, VerifyError
from dflow.tracing.ir.exact_attributes import exact_attributes
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.op import BodySignature
from dflow.tracing.ir.types import ArrayType, TokenType, Type, array_type_of, strong
from dflow.tracing.jax_frontend import make_jaxpr
from dflow.tracing.jaxprs.attributes import bind_node, has_body_rule, opaque_attribute
from dflow.tracing.source import at
from dflow.tracing.syntax.text import marked


def verify(graph: Graph) -> None:
    """Raise VerifyError, which names the node and quotes the graph, unless `graph` keeps the rules above."""
    seen = _DefinedValues(graph)
    for node in graph.nodes:
        seen.check(node)
    for output in graph.outputs:
        if not isinstance(output.type, ArrayType):
            raise VerifyError(f"the graph gives {output!r}, and only arrays can be given")
        if isinstance(output, Value) and output not in seen.defined:
            raise VerifyError(f"the graph gives %{output.name}, which nothing defines")


class _DefinedValues:
    """The values defined above the current node, and the checks of that node."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._names: set[str] = set()
        self.defined: set[Value] = set()
        self._inputs = set(graph.inputs)
        for value in graph.inputs:
            self._define(None, value)

    def check(self, node: Node) -> None:
        """Check a node and define its results."""
        for value in (*node.values, *node.after):
            if value not in self.defined:
                self._fail(node, f"%{value.name} is used before it is defined")
        self._check_types(node)
        self._check_effects(node)
        for value in node.outputs:
            self._define(node, value)

    def _define(self, node: Node | None, value: Value) -> None:
        if value in self.defined:
            self._fail(node, f"%{value.name} is defined twice")
        if value.name in self._names:
            self._fail(node, f"two values are called %{value.name}")
        self.defined.add(value)
        self._names.add(value.name)

    def _check_effects(self, node: Node) -> None:
        for effect, resource in node.effects:
            if resource is not None and resource not in self._inputs:
                self._fail(node, f"{effect.value} of {resource!r}, which is not an input of the graph")

    def _check_types(self, node: Node) -> None:
        try:
            expected = _result_types(node)
        except VerifyError:
            raise
        except Exception as error:  # JAX says no by TypeError, ValueError, KeyError, AssertionError and its own
            self._fail(node, f"{node.op.name} refuses its operands: {error}")
        given = [value.type for value in node.outputs]
        if expected is not None and [*map(strong, given)] != [*map(strong, expected)]:
            self._fail(
                node,
                f"{node.op.name} gives {', '.join(map(str, expected))} but its results are "
                f"{', '.join(map(str, given)) or 'none'}",
            )

    def _fail(self, node: Node | None, fact: str) -> NoReturn:
        if node is None:
            raise VerifyError(f"{fact} among the inputs of the graph")
        raise VerifyError(f"%{node.outputs[0].name}: {fact}{at(node.loc)}\n{marked(self._graph, node)}")


def _result_types(node: Node) -> Sequence[Type] | None:
    """The result types that the op's rule gives for the node's operands; None if the node's text lost an attribute."""
    types = [operand.type for operand in node.inputs]
    if node.op.rule is not None:
        results: Sequence[Type] = node.op.rule(*types, **node.attributes, **_signatures(node))
        return results
    arrays = [type for type in types if isinstance(type, ArrayType)]
    if len(arrays) != len(types):
        raise DflowError(f"it takes arrays alone, and was given {', '.join(map(str, types))}")
    inferred = _inferred(node, tuple(arrays))
    return inferred if inferred is None or inferred else (TokenType(),)


def _signatures(node: Node) -> Mapping[str, tuple[BodySignature, ...]]:
    """Verify a node's bodies; return their types as the argument `bodies` of the op's rule."""
    for body in node.bodies:
        verify(body)
    given = tuple(
        BodySignature(tuple(value.type for value in body.inputs), tuple(output.type for output in body.outputs))
        for body in node.bodies
    )
    return {"bodies": given} if given else {}


def _inferred(node: Node, types: tuple[ArrayType, ...]) -> Sequence[Type] | None:
    if node.op.primitive is None or (opaque_attribute(node) is not None and not has_body_rule(node)):
        return None
    shardings = tuple(type.sharding for type in types)
    applied = _Applied(node.op.primitive, exact_attributes(node.attributes), types, shardings, node)
    try:
        hash(applied)
    except TypeError:  # an attribute may be an array
        return _result_types_by_jax(applied)
    return _kept_result_types(applied)


@dataclass(frozen=True)
class _Applied:
    """A numeric node as the key of a cache: nodes with equal keys have results of the same types."""

    primitive: Any
    attributes: Hashable
    types: tuple[ArrayType, ...]
    shardings: tuple[Any, ...]
    node: Node = field(compare=False)


def _result_types_by_jax(applied: _Applied) -> Sequence[Type]:
    structs = [type.struct for type in applied.types]
    _, _, out = make_jaxpr(lambda *operands: bind_node(applied.node, operands), *structs)
    return [array_type_of(struct) for struct in out]


_kept_result_types = lru_cache(maxsize=4096)(_result_types_by_jax)
