"""From a lowered graph to one plan for each task."""

from __future__ import annotations

import dataclasses

import pytest

from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import pipeline
from dflow.lowering.steps.lowered import Lowered, literals, make_plans
from dflow.lowering.steps.plan import Call, Plan, Read, Recv, Send
from dflow.tracing.errors import InternalError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.syntax.text import parse
from tests.lowering.meaning import PS_0, TASKS, WORKER

TRAIN = """
graph(%w: ref<f32[3]> @/job:ps/task:0, %rate: ref<f32[3]> @/job:ps/task:0, %steps: ref<i32[]>, %x: f32[3]) {
 !%w_1: f32[3] = var.read(%w)
  %1: f32[3] = jax.mul(%w_1, %x)
 !%rate_1: f32[3] = var.read(%rate)  @with-state
  %2: f32[3] = jax.mul(%rate_1, %1)  @with-state
 !%3: token = var.assign_add(%w, %2)  @with-state
 !%4: token = var.assign_add(%steps, 1:i32[])
  return %1, %x, 7:i32[]
}"""


def plans(text: str, local: str = WORKER) -> dict[str, Lowered]:
    """The plans of a graph before placement; a variable's key is its name with a mark."""
    graph = run_passes(parse(text), pipeline(local, TASKS), check=True)
    return make_plans(graph, local, {ref: f"{ref.name}!" for ref in graph.refs})


def test_the_plan_of_a_parameter_server() -> None:
    lowered = plans(TRAIN)
    assert list(lowered) == [WORKER, PS_0]
    assert lowered[PS_0].plan == Plan(
        task=PS_0,
        registers=2,
        items=(
            Read(keys=("w!",), gives=(0,)),
            Send(edge="w", destination=WORKER, takes=(0,)),
            Recv(edge="jax.mul.1", source=WORKER, gives=(1,), types=(("f32", (3,)),)),
            Call(program=0, writes=("w!",), reads=("rate!",), takes=(1,), gives=(), after=(0,), asynchronous=True),
        ),
        names=("%w_1 (xla.call)", "%w_1.sent (net.send)", "%1.received (net.recv)", "%done (xla.call)"),
    )
    assert [list(map(str, pure.types)) for pure in lowered[PS_0].functions] == [["f32[3]"] * 3]


def test_the_plan_of_the_caller_has_the_feeds_and_the_fetches() -> None:
    plan = plans(TRAIN)[WORKER].plan
    # The feeds are the argument, then the literal that the function returns.
    assert [literal.item() for literal in literals(parse(TRAIN))] == [7]
    assert plan.feeds == (0, 1)
    received, product = 2, 3
    assert plan.fetches == (product, 0, 1)
    assert plan.registers == 4
    assert plan.items == (
        Call(program=0, writes=("steps!",), reads=(), takes=(), gives=(), asynchronous=True),
        Recv(edge="w", source=PS_0, gives=(received,), types=(("f32", (3,)),)),
        Call(program=1, writes=(), reads=(), takes=(received, 0), gives=(product,), asynchronous=True),
        Send(edge="jax.mul.1", destination=PS_0, takes=(product,)),
    )


def test_an_item_comes_after_another_once() -> None:
    lowered = plans("""
graph(%w: ref<f32[]>, %v: ref<f32[]>, %u: ref<f32[]> @/job:ps/task:0) {
 !%w_1: f32[] = var.read(%w)
 !%v_1: f32[] = var.read(%v)
 !%u_1: f32[] = var.read(%u)
  %s: f32[] = jax.add(%w_1, %v_1)
 !%1: token = var.assign(%w, %u_1)
 !%2: token = var.assign(%v, %u_1)
 !%3: token = var.assign(%u, %s)
  return
}""")
    *_, last = lowered[WORKER].plan.items
    assert isinstance(last, Call)
    assert last.writes == ("w!", "v!")
    assert last.after == (0,)


def test_a_graph_that_was_not_lowered_is_refused() -> None:
    graph = parse("graph(%x: f32[]) {\n  %1: f32[] = jax.neg(%x)  @/job:worker/task:0\n  return %1\n}")
    with pytest.raises(InternalError, match=r"jax\.neg is not part of a lowered graph"):
        make_plans(graph, WORKER, {})


def without_donation(graph: Graph) -> Graph:
    nodes = tuple(dataclasses.replace(node, attributes={"donate": ()}) if node.bodies else node for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def test_a_call_keeps_the_variables_that_it_does_not_donate() -> None:
    graph = run_passes(parse(TRAIN), pipeline(WORKER, TASKS))
    keys = {ref: ref.name for ref in graph.refs}
    for lowered, keeps in ((graph, False), (without_donation(graph), True)):
        plans = make_plans(lowered, WORKER, keys).values()
        calls = [item for each in plans for item in each.plan.items if isinstance(item, Call)]
        assert {call.keeps for call in calls if call.writes} == {keeps}
        assert not any(call.keeps for call in calls if not call.writes)
