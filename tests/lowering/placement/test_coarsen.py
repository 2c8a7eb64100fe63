from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.passes.order import order
from dflow.lowering.placement.coarsen import coarsened
from dflow.lowering.placement.work import Work, runs_how_long, work_in
from dflow.tracing.ir.graph import Graph
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.syntax.text import parse
from tests.effort import examples
from tests.lowering.stateful_graphs import stateful_graphs

COSTS = st.sampled_from([0.0, 0.1, 0.2, 1.0, 5.0])


@settings(max_examples=examples(60), deadline=None)
@given(stateful_graphs(), st.data())
def test_units_hold_each_node_once_come_after_what_they_need_and_are_of_one_kind(
    graph: Graph, data: st.DataObject
) -> None:
    graph = order(graph)
    count = len(graph.nodes)
    seconds = data.draw(st.lists(COSTS, min_size=count, max_size=count))
    kinds = data.draw(st.lists(st.sampled_from(["a", "b", None]), min_size=count, max_size=count))
    groups = coarsened(graph, seconds, kinds, 0.3)
    assert sorted(number for group in groups for number in group) == list(range(count))
    unit_of = {value: unit for unit, group in enumerate(groups) for n in group for value in graph.nodes[n].outputs}
    for unit, group in enumerate(groups):
        assert len({kinds[number] for number in group}) == 1
        assert len(group) == 1 or kinds[group[0]] is not None
        for number in group:
            for value in (*graph.nodes[number].values, *graph.nodes[number].after):
                assert unit_of.get(value, -1) <= unit


FORK = """
graph(%x: f32[4]) {
  %s: f32[4] = jax.neg(%x)
  %a: f32[4] = jax.sin(%s)
  %a2: f32[4] = jax.neg(%a)
  %b: f32[4] = jax.cos(%s)
  %b2: f32[4] = jax.neg(%b)
  %j: f32[4] = jax.add(%a2, %b2)
  return %j
}"""


def joined(graph: Graph, groups: tuple[tuple[int, ...], ...]) -> list[str]:
    return [" ".join(graph.nodes[number].outputs[0].name for number in group) for group in groups]


def test_what_is_small_goes_along_its_branch_and_keeps_branches_apart() -> None:
    graph = parse(FORK)
    assert joined(graph, coarsened(graph, [0.1, 5.0, 0.1, 5.0, 0.1, 0.1], ["k"] * 6, 0.3)) == ["s", "a a2", "b b2", "j"]


def test_small_branches_become_one_unit() -> None:
    graph = parse(FORK)
    assert joined(graph, coarsened(graph, [0.1] * 6, ["k"] * 6, 3.0)) == ["s a a2 b b2 j"]


def test_nodes_that_may_stand_elsewhere_are_never_joined() -> None:
    graph = parse(FORK)
    kinds = ["k", "k", "l", "k", "k", "k"]
    assert joined(graph, coarsened(graph, [0.1] * 6, kinds, 3.0)) == ["s a b b2", "a2", "j"]


def work_of_function(fn: Any, *args: object) -> Work:
    return work_in(trace(fn, args, {}).graph.nodes)


def test_work_is_counted_by_the_types_and_as_often_as_a_loop_turns() -> None:
    a, b = jnp.ones((8, 16)), jnp.ones((16, 4))
    once = work_of_function(lambda a, b: a @ b, a, b)
    assert once == Work(2.0 * 8 * 16 * 4, 4.0 * (8 * 16 + 16 * 4 + 8 * 4))
    square = jnp.ones((8, 8))
    looped = work_of_function(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=10)[0], square)
    assert looped.flops == 10 * 2.0 * 8**3
    image, kernel = jnp.ones((2, 3, 10, 10)), jnp.ones((5, 3, 3, 3))
    convolved = work_of_function(lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"), image, kernel)
    assert convolved.flops == 2.0 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


def test_only_a_loop_that_counts_no_turns_may_run_for_ever() -> None:
    def found(fn: object) -> list[bool]:
        return [runs_how_long(node) for node in trace(fn, (jnp.ones(3),), {}).graph.nodes]  # type: ignore[arg-type]

    assert any(found(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)))
    assert not any(found(lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, None, length=3)[0]))
