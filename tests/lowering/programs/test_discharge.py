"""The pure function of a graph with state: equal to the reference rules, and the graphs that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.programs.discharge import Discharged, discharge
from dflow.tracing.errors import InternalError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.syntax.text import parse
from tests.effort import examples
from tests.lowering.meaning import assert_equal_states, assert_equal_values
from tests.lowering.stateful_graphs import some_inputs, some_state, stateful_graphs
from tests.reference.interpret import interpret


def run(pure: Discharged, graph: Graph, inputs: Sequence[Any], state: dict[str, Any], fn: Any) -> Any:
    """Call a discharged function; return the outputs and the state."""
    refs = (*pure.written, *pure.read)
    results = fn(*(state[ref.name] for ref in refs), *inputs)
    renewed = {ref.name: value for ref, value in zip(pure.written, results, strict=False)}
    return results[len(pure.written) :], state | renewed


@settings(max_examples=examples(60))
@given(graph=stateful_graphs(), compiled=st.booleans())
def test_a_discharged_graph_does_what_the_graph_means(graph: Graph, compiled: bool) -> None:
    pure = discharge(graph)
    inputs, state = some_inputs(graph), some_state(graph)
    outputs, after = run(pure, graph, inputs, state, jax.jit(pure.fn) if compiled else pure.fn)
    wanted, end = interpret(graph, inputs, state)
    assert_equal_values(outputs, wanted)
    assert_equal_states(after, end)
    assert pure.written + pure.read == tuple(sorted(graph.refs, key=lambda ref: ref not in pure.written))
    assert pure.operands == graph.inputs[len(graph.refs) :]


def test_written_variables_come_first_each_group_in_the_order_of_the_graph() -> None:
    graph = parse("""
graph(%a: ref<f32[]>, %b: ref<i32[2]>, %c: ref<f32[]>, %d: ref<i32[]>, %x: f32[], %y: i32[2]) {
 !%a_1: f32[] = var.read(%a)
 !%1: token = var.assign_add(%c, %a_1)
 !%2: token = var.assign(%b, %y)
  return %a_1
}""")
    pure = discharge(graph)
    assert [ref.name for ref in pure.written] == ["b", "c"]
    assert [ref.name for ref in pure.read] == ["a", "d"]
    assert [value.name for value in pure.operands] == ["x", "y"]
    assert list(map(str, pure.types)) == ["i32[2]", "f32[]", "f32[]", "i32[]", "f32[]", "i32[2]"]


def test_a_variable_keeps_its_type_whatever_literal_it_is_given() -> None:
    graph = parse("""
graph(%w: ref<bf16[]>, %v: ref<bf16[]>) {
 !%1: token = var.assign(%w, 2.0:~bf16[])
 !%2: token = var.assign_add(%v, 2.0:~bf16[])
  return 1.5:~bf16[]
}""")
    results = jax.jit(discharge(graph).fn)(jnp.bfloat16(1), jnp.bfloat16(1))
    assert [str(array_type_of(result).strong) for result in results] == ["bf16[]"] * 3
    assert [result.item() for result in results] == [2.0, 3.0, 1.5]


def test_a_transfer_cannot_run_inside_an_xla_call() -> None:
    graph = parse("""
graph(%x: f32[]) {
 !%1: token = net.send(%x) {destination="/job:ps/task:0", edge="x"}
  return
}""")
    with pytest.raises(InternalError, match=r"net\.send cannot run inside an XLA call"):
        discharge(graph).fn(jnp.float32(1))
