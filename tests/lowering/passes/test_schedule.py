"""Schedules: the choice of devices, and calls that other devices wait for before the rest of their stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dflow.lowering.passes import cluster
from dflow.lowering.passes.base import run_passes
from dflow.lowering.passes.choose import Choose, may_choose
from dflow.lowering.passes.place import Place
from dflow.lowering.passes.schedule import schedule
from dflow.lowering.pipeline import ALONE, pipeline
from dflow.lowering.placement.graph_problem import Price
from dflow.lowering.placement.timeline import timeline
from dflow.lowering.placement.work import Work
from dflow.tracing.devices.device import choice_among, choices_in
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
from tests.lowering.placement.given_costs import GivenCosts
from tests.lowering.stateful_graphs import INT, some_inputs, some_state, stateful_graphs

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


THREE_DEVICES = ("cpu:0", "cpu:1", "cpu:2")
COSTS = GivenCosts()
PLACE = Place(ALONE, (ALONE,), THREE_DEVICES)


def chosen(text: str, costs: GivenCosts = COSTS, place: Place = PLACE) -> dict[str, str | None]:
    graph = Choose(place, costs)(parse(text))
    return {node.outputs[0].name: node.device for node in graph.nodes}


def dot(name: str, operand: str, device: str) -> str:
    return (
        f"  %{name}: f32[64,64] = jax.dot_general(%{operand}, %{operand}) "
        f"{{dimension_numbers=(((1,), (0,)), ((), ())), "
        f"out_sharding=None, precision=None, preferred_element_type=f32}}  @{device}\n"
    )


def test_two_heavy_branches_go_to_two_devices() -> None:
    text = "graph(%x: f32[64,64]) {\n" + dot("a", "x", "auto") + dot("b", "x", "auto") + "  return %a, %b\n}"
    assert sorted(map(str, chosen(text).values())) == ["/device:cpu:0", "/device:cpu:1"]


def test_a_choice_is_among_the_devices_that_it_names() -> None:
    one_of = "auto/cpu:1/cpu:2"
    text = "graph(%x: f32[64,64]) {\n" + dot("a", "x", one_of) + dot("b", "x", one_of) + "  return %a, %b\n}"
    assert set(chosen(text).values()) <= {"/device:cpu:1", "/device:cpu:2"}


def test_what_gains_nothing_stays_on_the_default_device() -> None:
    text = "graph(%x: f32[64]) {\n  %a: f32[64] = jax.sin(%x)  @auto\n  return %a\n}"
    assert chosen(text) == {"a": "/device:cpu:0"}


def test_an_op_goes_to_the_large_variable_that_it_reads() -> None:
    text = (
        "graph(%w: ref<f32[64,64]> @/device:cpu:2, %x: f32[]) {\n"
        " !%r: f32[64,64] = var.read(%w)  @auto\n" + dot("a", "r", "auto") + "  return %a\n}"
    )
    assert chosen(text) == {"r": None, "a": "/device:cpu:2"}


def test_with_one_device_nothing_is_chosen_or_measured() -> None:
    text = "graph(%x: f32[64]) {\n  %a: f32[64] = jax.sin(%x)  @auto\n  return %a\n}"
    assert chosen(text, costs=None, place=Place(ALONE, (ALONE,), ("cpu:0",))) == {"a": None}  # type: ignore[arg-type]


@settings(max_examples=examples(40), deadline=None)
@given(stateful_graphs(tasks=[f"/device:{device}" for device in THREE_DEVICES]), st.data())
def test_what_is_chosen_keeps_what_is_said_and_the_meaning(graph: Graph, data: st.DataObject) -> None:
    """The lowered graph has the same meaning for every choice of devices."""
    open_to = data.draw(st.sampled_from([(), THREE_DEVICES[1:]]))
    left_open = [data.draw(st.booleans()) for _ in graph.nodes]
    nodes = tuple(
        dataclasses.replace(node, device=choice_among(open_to)) if is_open else node
        for node, is_open in zip(graph.nodes, left_open, strict=True)
    )
    graph = dataclasses.replace(graph, nodes=nodes)
    made = Choose(PLACE, GivenCosts())(graph)
    assert not may_choose(made)
    for before, after in zip(graph.nodes, made.nodes, strict=True):
        if choices_in(before.device) is None:
            assert after.device == before.device
        elif not before.effects:
            assert after.device in {f"/device:{device}" for device in open_to or THREE_DEVICES}
    lowered = run_passes(graph, pipeline(ALONE, (ALONE,), THREE_DEVICES, GivenCosts()), check=True)
    assert_same_meaning(graph, lowered, some_inputs(graph), some_state(graph))


@dataclasses.dataclass(frozen=True)
class Slow(GivenCosts):
    """Costs that take all the time that they are given."""

    now: list[float] = dataclasses.field(default_factory=lambda: [0.0])

    def prices(self, parts: Sequence[Graph], names: Sequence[str], budget_s: float) -> list[Price]:
        self.now[0] += budget_s
        return super().prices(parts, names, budget_s)


@pytest.mark.parametrize(("budget_s", "search_s"), [(2.0, 0.6), (10.0, 1.0)])
def test_pricing_and_search_share_one_budget(budget_s: float, search_s: float) -> None:
    rows = "".join(dot(f"n{number}", "x", "auto") for number in range(20))
    graph = parse("graph(%x: f32[64,64]) {\n" + rows + f"  return {', '.join(f'%n{n}' for n in range(20))}\n}}")
    costs = Slow()

    def clock() -> float:
        costs.now[0] += 0.01
        return costs.now[0]

    decision = Choose(PLACE, costs, budget_s, clock).decide(graph)
    assert decision.pricing_s == pytest.approx(0.7 * budget_s, abs=0.05)
    assert decision.search_s == pytest.approx(search_s, abs=0.1)


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
