"""Cutting graphs down, and opening calls."""

from __future__ import annotations

import pytest

from dflow.tracing.ir.graph import Graph, Value
from dflow.tracing.part import body_names, is_call, opened, part_of
from dflow.tracing.syntax.text import parse, text
from dflow.tracing.syntax.verify import verify

TWO_WRITES = """graph(%w: ref<f32[3]>, %x: f32[3], %y: f32[3]) {
 !%1: f32[3] = var.read(%w)
 !%2: token = var.assign_add(%w, %x)
  %3: f32[3] = jax.neg(%1)
 !%4: token = var.assign(%w, %y)
 !%5: token = var.assign_add(%w, %y)
 !%6: f32[3] = var.read(%w)
  return %3, %6
}"""

CALL = """graph(%x: f32[]) {
  %1: f32[] = jax.jit(%x) {name="f", jaxpr=graph(%a: f32[] = 2.0:f32[], %b: f32[]) {
    %hidden: f32[] = jax.mul(%a, %b) {out_dtype=None}
    %1: f32[] = jax.neg(%hidden)
    return %1
  }}
  %2: f32[] = jax.neg(%1)
  return %2, %1
}"""


def named(graph: Graph, *names: str) -> list[Value]:
    values = {value.name: value for node in graph.nodes for value in node.outputs}
    values |= {value.name: value for value in graph.inputs}
    return [values[name] for name in names]


@pytest.mark.parametrize(
    ("wanted", "given", "kept", "inputs"),
    [
        (["3"], [], ["1", "3"], ["w"]),
        (["6"], [], ["4", "5", "6"], ["w", "y"]),
        (["2"], [], ["2"], ["w", "x"]),
        (["3"], ["1"], ["3"], ["1"]),
        (["3", "6"], ["3"], ["4", "5", "6"], ["w", "y", "3"]),
        (["x"], [], [], ["x"]),
        (["w"], [], [], ["w"]),
        (["1", "4"], [], ["1", "4"], ["w", "y"]),
    ],
)
def test_a_part_is_what_is_needed_and_the_writes_that_are_read(
    wanted: list[str], given: list[str], kept: list[str], inputs: list[str]
) -> None:
    graph = parse(TWO_WRITES)
    part = part_of(graph, named(graph, *wanted), named(graph, *given))
    assert [node.outputs[0].name for node in part.nodes] == kept
    assert [value.name for value in part.inputs] == inputs
    assert [output.name for output in part.outputs if isinstance(output, Value)] == wanted


def test_a_call_is_opened_in_its_place() -> None:
    graph = parse(CALL)
    assert is_call(graph.nodes[0])
    assert not is_call(graph.nodes[1])
    assert body_names(graph.nodes[0]) == {"a", "b", "hidden", "1"}
    after, constants = opened(graph, graph.nodes[0])
    verify(after)
    assert text(after) == (
        "graph(%x: f32[], %a: f32[]) {\n"
        "  %hidden: f32[] = jax.mul(%a, %x) {out_dtype=None}\n"
        "  %1_1: f32[] = jax.neg(%hidden)\n"
        "  %2: f32[] = jax.neg(%1_1)\n"
        "  return %2, %1_1\n"
        "}"
    )
    assert {value.name: float(constant) for value, constant in constants.items()} == {"a": 2.0}
