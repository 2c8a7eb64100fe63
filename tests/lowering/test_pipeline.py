"""Each pass, and all together, on random graphs: the result is valid and has the same meaning."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import pipeline
from dflow.tracing.devices.device_name import task_of
from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.syntax.verify import verify
from tests.effort import examples
from tests.graphs_ import Case, cases
from tests.lowering.meaning import (
    DEVICES,
    PLACES,
    TASKS,
    WORKER,
    assert_equal_states,
    assert_equal_values,
    assert_same_meaning,
    chooser,
)
from tests.lowering.one_process import Cluster
from tests.lowering.stateful_graphs import some_inputs, some_state, stateful_graphs
from tests.reference.interpret import interpret

PASSES = pipeline(WORKER, TASKS, DEVICES)
NAMES = [one.name for one in PASSES]
#: From here on the order of the node list has no meaning.
ORDERED = NAMES.index("order")
SEEDS = st.integers(0, 2**16)


@pytest.mark.parametrize("index", range(len(PASSES)), ids=NAMES)
@settings(max_examples=examples(40))
@given(graph=stateful_graphs(PLACES), seed=SEEDS)
def test_a_pass_keeps_the_meaning_of_any_graph(index: int, graph: Graph, seed: int) -> None:
    before = run_passes(graph, PASSES[:index])
    after = PASSES[index].made_of(before)
    verify(after)
    assert_same_meaning(before, after, choose=chooser(seed) if index >= ORDERED else None)


@settings(max_examples=examples(10))
@given(case=cases(devices=PLACES), seed=SEEDS)
def test_the_pipeline_keeps_the_meaning_of_any_traced_program(case: Case, seed: int) -> None:
    lowered = run_passes(case.graph, PASSES, check=True)
    assert_same_meaning(case.graph, lowered, case.inputs, case.state, chooser(seed))


def device_of_values(graph: Graph) -> dict[Value, str | None]:
    """Return the device of each value."""
    made = {value: node.device for node in graph.nodes for value in node.outputs}
    return {value: value.device or WORKER for value in graph.inputs} | made


@pytest.mark.parametrize("name", ["partition", "donate"])
@settings(max_examples=examples(40))
@given(graph=stateful_graphs(PLACES))
def test_after_partition_all_that_a_node_needs_is_on_its_task(name: str, graph: Graph) -> None:
    after = run_passes(graph, PASSES[: NAMES.index(name) + 1])
    where = device_of_values(after)
    assert {task_of(where[value]) for value in after.outputs if isinstance(value, Value)} <= {WORKER}
    for node in after.nodes:
        assert node.device is not None
        assert {task_of(where[value]) for value in (*node.values, *node.after)} <= {task_of(node.device)}
        if node.op is not ops.dev_copy:
            assert {where[value] for value in node.values} <= {node.device}


@given(graph=stateful_graphs(PLACES))
def test_a_value_crosses_once_to_a_task_and_to_a_device_of_it(graph: Graph) -> None:
    after = run_passes(graph, PASSES[: NAMES.index("partition") + 1])
    sends = [node for node in after.nodes if node.op is ops.net_send]
    edges = {node.inputs[0]: node.attributes["edge"] for node in sends}
    assert len(set(edges.values())) == len(edges)
    sent = Counter((n.attributes["edge"], task_of(str(n.device)), n.attributes["destination"]) for n in sends)
    received = Counter(
        (n.attributes["edge"], n.attributes["source"], n.device) for n in after.nodes if n.op is ops.net_recv
    )
    assert sent == received
    assert set(sent.values()) <= {1}
    copied = Counter((node.inputs[0], node.device) for node in after.nodes if node.op is ops.dev_copy)
    assert set(copied.values()) <= {1}


@given(graph=stateful_graphs(PLACES))
def test_all_between_two_transfers_of_a_task_is_one_call(graph: Graph) -> None:
    """Or two: one call only computes values for other tasks, and the other one changes state."""
    after = run_passes(graph, PASSES)
    assert {node.op for node in after.nodes} <= {ops.xla_call, ops.net_send, ops.net_recv, ops.dev_copy}
    levels: dict[Value, int] = {}
    sent: dict[Any, int] = {}
    calls = []
    for node in after.nodes:
        level = max((_level(value, node, after, levels) for value in (*node.values, *node.after)), default=0)
        if node.op is ops.net_send:
            sent[node.attributes["edge"], node.attributes["destination"]] = level + 1
        if node.op is ops.net_recv:
            level = sent[node.attributes["edge"], node.device]
        levels.update(dict.fromkeys(node.outputs, level))
        calls += [(node.device, level, _only_sends(node, after))] if node.op is ops.xla_call else []
    assert len(calls) == len(set(calls))


def _only_sends(call: Node, graph: Graph) -> bool:
    """Whether a call changes no state, and one of its results is sent."""
    sends = any(user.op is ops.net_send for value in call.outputs for user in graph.uses.get(value, ()))
    return sends and not any(node.must_run for node in call.bodies[0].nodes)


def _level(value: Value, user: Node, graph: Graph, levels: Mapping[Value, int]) -> int:
    """Return the level of a node that needs this value: one more if the value comes from another device."""
    maker = graph.producers.get(value)
    if maker is None:
        return 0
    waits = maker.op is ops.xla_call is user.op and maker.device != user.device
    return levels[value] + (maker.op is ops.dev_copy or waits)


def ancestors(graph: Graph) -> dict[int, set[int]]:
    """Return, for each node by its index, the nodes that must run before it: by operand, order edge or transfer."""
    makers = {value: index for index, node in enumerate(graph.nodes) for value in node.outputs}
    sends = {
        (node.attributes["edge"], node.attributes["destination"]): index
        for index, node in enumerate(graph.nodes)
        if node.op is ops.net_send
    }
    before: dict[int, set[int]] = {}
    for index, node in enumerate(graph.nodes):
        needed = {makers[value] for value in (*node.values, *node.after) if value in makers}
        if node.op is ops.net_recv:
            needed.add(sends[node.attributes["edge"], node.device])
        before[index] = needed.union(*(before[other] for other in needed))
    return before


def conflicts(graph: Graph) -> list[tuple[str, str]]:
    """Return the nodes of a partitioned graph whose order is observable, as pairs of their first results' names."""
    nodes = [node for node in graph.nodes if node.op not in (ops.net_send, ops.net_recv, ops.dev_copy) and node.effects]
    return [
        (one.outputs[0].name, other.outputs[0].name)
        for one, other in itertools.combinations(nodes, 2)
        if task_of(str(one.device)) == task_of(str(other.device))
        and any(
            Effect.UNKNOWN in (first, second) or (on is where and {first, second} != {Effect.READ})
            for first, on in one.effects
            for second, where in other.effects
        )
    ]


@settings(max_examples=examples(200))
@given(graph=stateful_graphs(PLACES))
def test_effects_whose_order_can_be_seen_are_held_apart_by_edges(graph: Graph) -> None:
    partitioned = run_passes(graph, PASSES[:ORDERED])
    ordered, clustered = PASSES[ORDERED].made_of(partitioned), run_passes(partitioned, PASSES[ORDERED:])
    for after in (ordered, clustered):
        before = ancestors(after)
        bodies = [node.bodies[0].nodes if node.bodies else (node,) for node in after.nodes]
        places = {
            inner.outputs[0].name: (index, place)
            for index, body in enumerate(bodies)
            for place, inner in enumerate(body)
        }
        for one, other in conflicts(partitioned):
            (first, place), (second, later) = places[one], places[other]
            assert first in before[second] or (first == second and place < later), f"{one}, {other}"


@settings(max_examples=examples(25))
@given(graph=stateful_graphs(TASKS, max_nodes=8), seed=SEEDS)
def test_tasks_that_run_their_plans_do_what_the_graph_means(graph: Graph, seed: int) -> None:
    inputs, state = some_inputs(graph), some_state(graph)
    cluster = Cluster(graph, state)
    for step in range(2):
        wanted, state = interpret(graph, inputs, state)
        assert_equal_values(cluster.run(inputs, seed + step), wanted)
        assert_equal_states(cluster.state(), state)
