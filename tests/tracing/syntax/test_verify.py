"""Each rule of a well-formed graph, broken once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflow.tracing.errors import VerifyError
from dflow.tracing.ir.graph import Graph, Value
from dflow.tracing.ir.types import parse_type
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


def test_a_node_that_text_could_not_carry_is_trusted() -> None:
    verify(parse("graph(%x: f32[3]) {\n  %1: f32[3] = jax.made_up(%x) {fn=<function f>}\n  return %1\n}"))
    verify(parse("graph(%x: f32[3]) {\n  %1: f32[3] = jax.pure_callback(%x) {callback=<f>}\n  return %1\n}"))


TWO = parse(GRAPH)
STRANGER = Value("s", parse_type("f32[3]"))
INNER = Value("inner", TWO.inputs[0].type)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (replace(TWO, nodes=(TWO.nodes[0], *TWO.nodes)), "%r is defined twice"),
        (replace(TWO, inputs=(*TWO.inputs, TWO.inputs[0])), "%w is defined twice among the inputs"),
        (with_node(2, outputs=(Value("x", parse_type("token")),)), "two values are called %x"),
        (replace(TWO, outputs=(STRANGER,)), "the graph gives %s, which nothing defines"),
        (replace(TWO, outputs=(TWO.inputs[0],)), r"the graph gives %w: ref<f32\[3\]>, and only arrays"),
        (with_node(0, after=TWO.nodes[2].outputs), "%a is used before it is defined"),
        (with_node(1, outputs=(INNER,)), "results are ref<f32"),
    ],
)
def test_a_graph_that_is_not_well_formed_is_refused(graph: Graph, message: str) -> None:
    broken(graph, message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("%r, %x)", "%r, %w)", "it takes arrays alone, and was given f32"),
        ("%x: f32[3]", "%x: f32[2]", "jax.add refuses its operands: .*add.*shape"),
        ("%r, %x)", "%r)", "jax.add refuses its operands"),
        ("%r, %x)", "%r, 2.0:f16[])", "jax.add refuses its operands: .*dtype"),
        ("var.read(%w)", "var.read(%w, %x)", "var.read refuses its operands: .*argument"),
        ("var.read(%w)", "var.read(%w) {axis=0}", "var.read refuses .*'axis'"),
        ("%w, %p)", "%w, 1.0:f16[])", r"var.assign_add refuses its operands: .* the value is f16\[\] but the variable"),
        ("%r: f32[3] =", "%r: f32[2] =", r"var.read gives f32\[3\] but its results are f32\[2\]"),
        ("%p: f32[3] =", "%p: f32[2] =", r"jax.add gives f32\[3\] but its results are f32\[2\]"),
        ("call(%w, %x)", "call(%w)", r"its body takes \(ref<f32\[3\]>, f32\[3\]\) and was given"),
        ("return %2", "return", "xla.call gives token but its results are f32"),
        ("var.assign(%a, %b)", "var.assign(%b, %b)", "the first operand is f32.*not a variable"),
    ],
)
def test_operands_and_results_that_do_not_fit_the_op_are_refused(old: str, new: str, message: str) -> None:
    text = next(text for text in (GRAPH, CALL) if old in text)
    verify(parse(text))
    broken(parse(text.replace(old, new)), message)
