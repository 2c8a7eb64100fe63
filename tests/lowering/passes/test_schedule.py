from __future__ import annotations

from functools import partial
from pathlib import Path

from hypothesis import event, given, settings
from hypothesis import strategies as st

from dflow.lowering.passes.base import run_passes
from dflow.lowering.passes.schedule import schedule
from dflow.lowering.pipeline import pipeline
from dflow.lowering.placement.timeline import timeline
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import FreshNames, Graph, Node, Value
from dflow.tracing.ir.op import numeric
from dflow.tracing.ir.types import RefType, TokenType
from dflow.tracing.jax_frontend import primitives_by_name
from dflow.tracing.syntax.text import parse, text
from dflow.tracing.syntax.verify import verify
from tests.effort import examples
from tests.golden import read_golden
from tests.lowering.meaning import DEVICES, PLACES, PS_0, TASKS, WORKER, assert_same_meaning, chooser
from tests.lowering.stateful_graphs import INT, stateful_graphs

any_size = partial(schedule, least_bytes=0)
GOLDEN = Path(__file__).with_name("schedule.graphs")
PASSES = pipeline(WORKER, TASKS, DEVICES)
CLUSTERED = PASSES[: [one.name for one in PASSES].index("schedule")]
ON_DEVICES = [f"/device:{device}" for device in DEVICES]


@st.composite
def alternating(draw: st.DrawFn) -> Graph:
    """A number that moves over devices and a task, combined with variables, arguments and earlier results."""
    places = st.sampled_from([*ON_DEVICES, *ON_DEVICES, PS_0] if draw(st.booleans()) else ON_DEVICES)
    fresh = FreshNames()
    refs = [Value(fresh("w"), RefType(INT), draw(places)) for _ in range(3)]
    number, *others = arrays = [Value(fresh("x"), INT) for _ in range(3)]
    nodes: list[Node] = []
    for _ in range(draw(st.integers(3, 12))):
        ref = draw(st.sampled_from([*refs, None, None]))
        if ref is not None:
            others.append(Value(fresh("read"), INT))
            nodes.append(Node(ops.var_read, (ref,), (others[-1],)))
            if draw(st.integers(0, 3)) == 0:
                nodes.append(Node(ops.var_assign, (ref, number), (Value(fresh("done"), TokenType()),)))
        made = Value(fresh("n"), INT)
        operands = (number, draw(st.sampled_from(others)))
        nodes.append(Node(numeric(primitives_by_name()["sub"]), operands, (made,), device=draw(places)))
        others += [made] if draw(st.booleans()) else []
        number = made
    outputs = (number, *draw(st.lists(st.sampled_from(others), max_size=2)))
    return Graph((*refs, *arrays), tuple(nodes), outputs)


def clustered() -> st.SearchStrategy[Graph]:
    """Graphs as the pass receives them: over several devices of one task, and over several tasks."""
    programs = st.one_of(alternating(), alternating(), stateful_graphs(PLACES, max_nodes=20))
    return programs.map(lambda graph: run_passes(graph, CLUSTERED))


@settings(max_examples=examples(80))
@given(before=clustered(), seed=st.integers(0, 2**16))
def test_copies_wait_for_calls_and_by_the_timeline_nothing_gets_worse(before: Graph, seed: int) -> None:
    after = any_size(before)
    verify(after)
    assert_same_meaning(before, after, choose=chooser(seed))
    old = {node.outputs: node for node in before.nodes}
    assert old.keys() == {node.outputs for node in after.nodes}
    makers = after.producers
    for node in after.nodes:
        own = old[node.outputs]
        assert (node.op, node.inputs, node.device, node.bodies) == (own.op, own.inputs, own.device, own.bodies)
        if node.after != own.after:
            (call,) = (makers[value] for value in node.after if value not in own.after)
            assert (node.op, call.op, call.device) == (ops.dev_copy, ops.xla_call, node.device)
    assert_no_later(before, after)
    assert_waits_for_no_more(before, after)
    event(f"delayed: {len(delayed(after)) > 0}")


def assert_no_later(before: Graph, after: Graph) -> None:
    """Assert that by the timeline no call is later and no device holds more."""
    old, new = timeline(before), timeline(after)
    ends = {node.outputs: end for node, end in zip(before.nodes, old.end, strict=True)}
    for node, end in zip(after.nodes, new.end, strict=True):
        if node.op is not ops.dev_copy:
            assert end == ends[node.outputs], node
    assert max(new.end, default=0) == max(old.end, default=0)
    assert old.peak_bytes.keys() == new.peak_bytes.keys()
    assert all(new.peak_bytes[device] <= held for device, held in old.peak_bytes.items())
    for node in before.nodes:
        for value in node.array_outputs if node.op is not ops.dev_copy else ():
            free = old.free_until.get(value, 0)
            assert max(new.last_use(value), free) <= max(old.last_use(value), free), value
    event(f"less memory: {any(new.peak_bytes[device] < held for device, held in old.peak_bytes.items())}")


def assert_waits_for_no_more(before: Graph, after: Graph) -> None:
    """Assert that a copy waits for no other task that its users do not wait for."""
    waits: dict[Value, set[str]] = {}
    for node in before.nodes:
        own = {node.attributes["edge"]} if node.op is ops.net_recv else set[str]()
        found = own.union(*(waits.get(value, set()) for value in (*node.values, *node.after)))
        waits.update(dict.fromkeys(node.outputs, found))
    for copy in delayed(after):
        (copied,) = copy.outputs
        for user in after.uses[copied]:
            needed = set[str]().union(*(waits.get(value, set()) for value in (*user.values, *user.after)))
            assert waits[copy.after[0]] <= needed


def delayed(graph: Graph) -> list[Node]:
    """Return the copies that come after a call."""
    return [node for node in graph.nodes if node.op is ops.dev_copy and node.after]


def test_it_finds_nothing_more_when_run_again() -> None:
    for case in read_golden(GOLDEN):
        once = any_size(parse(case.input))
        assert text(any_size(once)) == text(once)


def test_what_is_small_is_copied_at_once() -> None:
    graph = parse(read_golden(GOLDEN)[0].input)
    assert delayed(any_size(graph))
    assert schedule(graph) is graph
