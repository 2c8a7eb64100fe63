"""Check that a graph is well formed. Every pass may assume these rules, and must keep them.

- Each value is defined once, before its use, under a name no other value of the graph has.
- Each op accepts the types of its operands, and its results have the types its rule gives. A node read from text
  that could not carry one of its attributes is trusted.
- Each effect on a variable is on an input of the graph; what a node comes `after` is defined before it.
- The bodies of a node are well formed, take what the node hands them, and give what the node's op wants of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    inputs, defined, names = set(graph.inputs), set[Value](), set[str]()

    def define(node: Node | None, value: Value) -> None:
        if value in defined:
            _fail(graph, node, f"%{value.name} is defined twice")
        if value.name in names:
            _fail(graph, node, f"two values are called %{value.name}")
        defined.add(value)
        names.add(value.name)

    for value in graph.inputs:
        define(None, value)
    for node in graph.nodes:
        for value in (*node.values, *node.after):
            if value not in defined:
                _fail(graph, node, f"%{value.name} is used before it is defined")
        _check_types(graph, node)
        for effect, resource in node.effects:
            if resource is not None and resource not in inputs:
                _fail(graph, node, f"{effect.value} of {resource!r}, which is not an input of the graph")
        for value in node.outputs:
            define(node, value)
    for output in graph.outputs:
        if not isinstance(output.type, ArrayType):
            raise VerifyError(f"the graph gives {output!r}, and only arrays can be given")
        if isinstance(output, Value) and output not in defined:
            raise VerifyError(f"the graph gives %{output.name}, which nothing defines")


def _check_types(graph: Graph, node: Node) -> None:
    try:
        expected = _result_types(node)
    except VerifyError:
        raise
    except Exception as error:  # JAX says no by TypeError, ValueError, KeyError, AssertionError and its own
        _fail(graph, node, f"{node.op.name} refuses its operands: {error}")
    given = [value.type for value in node.outputs]
    if expected is not None and [*map(strong, given)] != [*map(strong, expected)]:
        fact = f"{', '.join(map(str, expected))} but its results are {', '.join(map(str, given)) or 'none'}"
        _fail(graph, node, f"{node.op.name} gives {fact}")


def _fail(graph: Graph, node: Node | None, fact: str) -> NoReturn:
    if node is None:
        raise VerifyError(f"{fact} among the inputs of the graph")
    raise VerifyError(f"%{node.outputs[0].name}: {fact}{at(node.loc)}\n{marked(graph, node)}")


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


#: The result types of numeric nodes, by all that they depend on.
_known: dict[Any, Sequence[Type]] = {}
_MOST_KNOWN = 4096


def _inferred(node: Node, types: tuple[ArrayType, ...]) -> Sequence[Type] | None:
    if node.op.primitive is None or (opaque_attribute(node) is not None and not has_body_rule(node)):
        return None
    key = node.op.primitive, exact_attributes(node.attributes), types, tuple(type.sharding for type in types)
    try:
        found = _known.get(key)
    except TypeError:  # an attribute may be an array
        return _result_types_by_jax(node, types)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = _result_types_by_jax(node, types)
    return found


def _result_types_by_jax(node: Node, types: Sequence[ArrayType]) -> Sequence[Type]:
    _, _, out = make_jaxpr(lambda *operands: bind_node(node, operands), *(type.struct for type in types))
    return [array_type_of(struct) for struct in out]
