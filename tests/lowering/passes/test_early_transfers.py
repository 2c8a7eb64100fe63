"""Calls that other devices wait for run before the rest of their stage."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.passes import cluster
from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import pipeline
from dflow.lowering.placement.work import Work
from dflow.tracing.ir.graph import Graph, Node
from dflow.tracing.syntax.text import parse
from tests.effort import examples
from tests.lowering.meaning import DEVICES, PLACES, TASKS, WORKER, assert_same_meaning, chooser
from tests.lowering.stateful_graphs import stateful_graphs

ANY_REST = mock.patch.object(cluster, "LEAST_REST", Work(-1.0, -1.0))
DOT = "dimension_numbers=(((1,), (0,)), ((), ())), out_sharding=None, precision=None, preferred_element_type=f32"


def fork(size: int, update: str = "", result: str = "") -> Graph:
    """`a` is copied to another device; `b` uses it too, and no op there waits for `b`."""
    array = f"f32[{size},{size}]"
    return parse(f"""
graph(%w: ref<f32[]> @/device:cpu:0, %x: {array}) {{
  %a: {array} = jax.sin(%x)  @/device:cpu:0
  %b: {array} = jax.dot_general(%a, %a) {{{DOT}}}  @/device:cpu:0
  %c: {array} = jax.dot_general(%a, %a) {{{DOT}}}  @/device:cpu:1
{update}  return %b, %c{result}
}}""")


def calls(graph: Graph) -> list[tuple[str, list[str]]]:
    """Return the device of each call with the names of its nodes' results, and the copies, in the order of the list."""
    found = []
    for node in graph.nodes:
        inner = [n.outputs[0].name for body in node.bodies for n in body.nodes]
        found.append(((node.device or "").rpartition("/device:")[2], inner))
    return found


def lowered(graph: Graph) -> Graph:
    return run_passes(graph, pipeline(WORKER, TASKS, DEVICES), check=True)


def test_what_is_copied_is_a_call_before_the_rest_and_its_copy_goes_first() -> None:
    assert calls(lowered(fork(512))) == [("cpu:0", ["a"]), ("cpu:1", []), ("cpu:0", ["b"]), ("cpu:1", ["c"])]


def test_a_short_rest_stays_in_the_call() -> None:
    assert calls(lowered(fork(8))) == [("cpu:0", ["a", "b"]), ("cpu:1", []), ("cpu:1", ["c"])]


def test_state_is_touched_by_one_call() -> None:
    """The read and the write of a variable stay in one call, before the copy where one of them must; other work
    follows.
    """
    update = (
        " !%r: f32[] = var.read(%w)  @/device:cpu:0\n"
        "  %s: f32[512,512] = jax.mul(%a, %r)  @/device:cpu:1\n"
        "  %t: f32[] = jax.neg(%r)  @/device:cpu:0\n"
        " !%done: token = var.assign(%w, %t)  @/device:cpu:0\n"
    )
    first = calls(lowered(fork(512, update, ", %s")))[0]
    assert first == ("cpu:0", ["a", "r", "t", "done"])


@settings(max_examples=examples(60), deadline=None)
@given(stateful_graphs(PLACES), st.integers(0, 2**16))
def test_any_graph_keeps_its_meaning_however_short_the_rest(graph: Graph, seed: int) -> None:
    with ANY_REST:
        assert_same_meaning(graph, lowered(graph), choose=chooser(seed))


@settings(max_examples=examples(60), deadline=None)
@given(stateful_graphs(PLACES))
def test_nothing_of_the_rest_is_needed_by_what_goes_first_and_state_is_never_divided(graph: Graph) -> None:
    divided: list[tuple[Sequence[Node], Sequence[Node]]] = []
    split = cluster.early_and_rest

    def recorded(graph: Graph, nodes: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
        divided.append(split(graph, nodes))
        return divided[-1]

    with ANY_REST, mock.patch.object(cluster, "early_and_rest", recorded):
        lowered(graph)
    for first, rest in divided:
        later = {value for node in rest for value in node.outputs}
        assert not any(later.intersection((*node.values, *node.after)) for node in first)
        assert not (any(node.effects for node in first) and any(node.effects for node in rest))
