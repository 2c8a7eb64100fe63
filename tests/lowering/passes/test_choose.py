from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.passes.base import run_passes
from dflow.lowering.passes.choose import Choose, may_choose
from dflow.lowering.passes.place import Place
from dflow.lowering.pipeline import ALONE, pipeline
from dflow.lowering.placement.graph_problem import Price
from dflow.tracing.devices.device import choice_among, choices_in
from dflow.tracing.ir.graph import Graph
from dflow.tracing.syntax.text import parse
from tests.effort import examples
from tests.lowering.meaning import assert_same_meaning
from tests.lowering.placement.given_costs import GivenCosts
from tests.lowering.stateful_graphs import some_inputs, some_state, stateful_graphs

DEVICES = ("cpu:0", "cpu:1", "cpu:2")
COSTS = GivenCosts()
PLACE = Place(ALONE, (ALONE,), DEVICES)


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
@given(stateful_graphs(tasks=[f"/device:{device}" for device in DEVICES]), st.data())
def test_what_is_chosen_keeps_what_is_said_and_the_meaning(graph: Graph, data: st.DataObject) -> None:
    """The lowered graph has the same meaning for every choice of devices."""
    open_to = data.draw(st.sampled_from([(), DEVICES[1:]]))
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
            assert after.device in {f"/device:{device}" for device in open_to or DEVICES}
    lowered = run_passes(graph, pipeline(ALONE, (ALONE,), DEVICES, GivenCosts()), check=True)
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
