"""Each rule of a well-formed graph, broken once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflow.tracing.errors import VerifyError
from dflow.tracing.ir.graph import Graph, Literal, Node, Value
from dflow.tracing.ir.types import ArrayType, RefType, parse_type
from dflow.tracing.syntax.text import parse
from dflow.tracing.syntax.verify import verify

GRAPH = """
graph(%w: ref<f32[3]>, %x: f32[3]) {
 !%r: f32[3] = var.read(%w)  # train.py:14
  %p: f32[3] = jax.add(%r, %x)  # train.py:15
 !%a: token = var.assign_add(%w, %p)  after(%r)
  return %p
}"""


def broken(graph: Graph, message: str) -> str:
    with pytest.raises(VerifyError, match=message) as caught:
        verify(graph)
    return str(caught.value)


def with_node(index: int, **changes: object) -> Graph:
    graph = parse(GRAPH)
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **changes)  # type: ignore[arg-type]
    return replace(graph, nodes=tuple(nodes))


def test_a_good_graph_passes() -> None:
    verify(parse(GRAPH))


def test_the_message_names_the_line_and_marks_the_node() -> None:
    graph = parse(GRAPH)
    swapped = replace(graph, nodes=(graph.nodes[1], graph.nodes[0], graph.nodes[2]))
    assert broken(swapped, "%r is used before it is defined").split("\n") == [
        "%p: %r is used before it is defined",
        "  at train.py:15",
        "    graph(%w: ref<f32[3]>, %x: f32[3]) {",
        "-->   %p: f32[3] = jax.add(%r, %x)  # train.py:15",
        "     !%r: f32[3] = var.read(%w)  # train.py:14",
        "     !%a: token = var.assign_add(%w, %p)  after(%r)",
        "      return %p",
        "    }",
    ]


def test_a_value_is_defined_once() -> None:
    graph = parse(GRAPH)
    broken(replace(graph, nodes=(graph.nodes[0], *graph.nodes)), "%r is defined twice")
    broken(replace(graph, inputs=(*graph.inputs, graph.inputs[0])), "%w is defined twice among the inputs")


def test_a_name_is_one_values() -> None:
    broken(with_node(2, outputs=(Value("x", parse_type("token")),)), "two values are called %x")


def test_outputs_are_defined_arrays() -> None:
    graph = parse(GRAPH)
    stranger = Value("s", parse_type("f32[3]"))
    broken(replace(graph, outputs=(stranger,)), "the graph gives %s, which nothing defines")
    broken(replace(graph, outputs=(graph.inputs[0],)), r"the graph gives %w: ref<f32\[3\]>, and only arrays")


def test_order_edges_come_from_before() -> None:
    graph = parse(GRAPH)
    broken(with_node(0, after=graph.nodes[2].outputs), "%a is used before it is defined")


def test_operands_are_what_the_op_takes() -> None:
    w, x = parse(GRAPH).inputs
    text = GRAPH.replace("%x: f32[3]", "%x: f32[2]").replace("var.assign_add(%w, %p)", "var.assign_add(%w, %x)")
    graph = parse(text.replace("jax.add(%r, %x)", "jax.neg(%r)"))
    broken(graph, r"var.assign_add refuses its operands: .* the value is f32\[2\] but the variable holds f32\[3\]")
    broken(parse(GRAPH.replace("jax.add(%r, %x)", "jax.add(%r, %w)")), "it takes arrays alone, and was given f32")
    broken(parse(GRAPH.replace("%x: f32[3]", "%x: f32[2]")), "jax.add refuses its operands: .*add.*shape")
    broken(parse(GRAPH.replace("jax.add(%r, %x)", "jax.add(%r)")), "jax.add refuses its operands")
    broken(parse(GRAPH.replace("var.read(%w)", "var.read(%w, %x)")), "var.read refuses its operands: .*argument")
    assert isinstance(w.type, RefType)
    assert isinstance(x.type, ArrayType)


def test_results_are_what_the_op_gives() -> None:
    text = GRAPH.replace("%p: f32[3]", "%p: f32[2]").replace("assign_add(%w, %p)", "assign_add(%w, %r)")
    broken(parse(text), r"jax.add gives f32\[3\] but its results are f32\[2\]")
    broken(
        parse(GRAPH.replace("%r: f32[3] =", "%r: f32[2] =")), r"var.read gives f32\[3\] but its results are f32\[2\]"
    )


def test_an_attribute_the_op_does_not_have_is_refused() -> None:
    broken(parse(GRAPH.replace("var.read(%w)", "var.read(%w) {axis=0}")), "var.read refuses .*'axis'")


def test_effects_are_on_inputs_of_the_graph() -> None:
    graph = parse(GRAPH)
    inner = Value("inner", RefType(ArrayType(*_f32_3())))
    maker = Node(graph.nodes[1].op, graph.nodes[1].inputs, (inner,))
    reader = replace(graph.nodes[0], inputs=(inner,))
    broken(Graph(graph.inputs, (graph.nodes[0], maker, reader), ()), "results are ref<f32")


def _f32_3() -> tuple[object, tuple[int, ...]]:
    type = parse_type("f32[3]")
    assert isinstance(type, ArrayType)
    return type.dtype, type.shape


CALL = """
graph(%w: ref<f32[3]>, %x: f32[3]) {
 !%1: f32[3] = xla.call(%w, %x) {donate=(0,)} {
    graph(%a: ref<f32[3]>, %b: f32[3]) {
     !%1: token = var.assign(%a, %b)
      %2: f32[3] = jax.neg(%b)
      return %2
    }
  }
  return %1
}"""


def test_bodies_are_checked_and_fit_their_node() -> None:
    verify(parse(CALL))
    broken(parse(CALL.replace("call(%w, %x)", "call(%w)")), r"its body takes \(ref<f32\[3\]>, f32\[3\]\) and was given")
    broken(parse(CALL.replace("      return %2", "      return")), "xla.call gives token but its results are f32")
    broken(parse(CALL.replace("var.assign(%a, %b)", "var.assign(%b, %b)")), "the first operand is f32.*not a variable")


def test_a_node_that_text_could_not_carry_is_trusted() -> None:
    verify(parse("graph(%x: f32[3]) {\n  %1: f32[3] = jax.made_up(%x) {fn=<function f>}\n  return %1\n}"))
    verify(parse("graph(%x: f32[3]) {\n  %1: f32[3] = jax.pure_callback(%x) {callback=<f>}\n  return %1\n}"))


def test_literals_count_as_operands() -> None:
    text = GRAPH.replace("jax.add(%r, %x)", "jax.add(%r, 2.0:f16[])")
    broken(parse(text), "jax.add refuses its operands: .*dtype")
    graph = parse(GRAPH.replace("return %p", "return 2.0:f32[]"))
    assert isinstance(graph.outputs[0], Literal)
    verify(graph)
