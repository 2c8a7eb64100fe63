from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, pairwise

import pytest

from dflow.lowering.placement.measure import Meter, UnitCost
from dflow.lowering.placement.work import work_of
from dflow.tracing.errors import DeadlineExceeded
from dflow.tracing.ir.graph import Graph
from dflow.tracing.syntax.text import parse

DOT = "dimension_numbers=(((1,), (0,)), ((), ())), out_sharding=None, precision=None, preferred_element_type=f32"
TWICE = f"""
graph(%w: ref<f32[32,32]>, %x: f32[32,32], %k: key<fry>[]) {{
 !%r: f32[32,32] = var.read(%w)
  %a: f32[32,32] = jax.dot_general(%r, %x) {{{DOT}}}
  %b: f32[32,32] = jax.dot_general(%a, %x) {{{DOT}}}
 !%done: token = var.assign_add(%w, %b)
  %bits: u32[4] = jax.random_bits(%k) {{bit_width=32, shape=(4,)}}
  return %b, %bits
}}"""


def ticking(step_s: float = 1e-3) -> Callable[[], float]:
    """A clock that advances by `step_s` at each reading."""
    ticks: Iterator[int] = count()
    return lambda: next(ticks) * step_s


def parts_of(graph: Graph) -> list[Graph]:
    return [graph.part([node]) for node in graph.nodes]


def test_a_machine_is_measured_once() -> None:
    meter = Meter()
    one, again = meter.machine(("cpu:0",)), meter.machine(("cpu:0",))
    assert one == again
    assert one.names == ("cpu:0",)
    assert one.launch_s[0] > 0
    assert one.speeds == ((),)
    rates = meter.rates("cpu:0")
    assert min(rates.flops_per_s, rates.bytes_per_s) > 0


def test_parts_that_differ_in_names_alone_cost_the_same_and_a_read_nothing() -> None:
    meter = Meter()
    read, first, second, update, bits = meter.prices(parts_of(parse(TWICE)), ("cpu:0", "cpu:0"), 60.0)
    assert read.seconds == (0.0, 0.0)
    assert first == second
    assert first.seconds[0] == first.seconds[1] >= 0
    assert update.seconds[0] >= 0
    # A key cannot be made from zeros and ones, so its cost is estimated.
    assert bits.seconds[0] >= 0


def test_what_the_time_does_not_allow_to_be_measured_is_estimated() -> None:
    graph, meter = parse(TWICE), Meter(clock=ticking(0.1))
    prices = meter.prices(parts_of(graph), ("cpu:0",), 0.0)
    assert [price.seconds[0] for price in prices] == [meter.estimate(node, "cpu:0") for node in graph.nodes]


def square(size: int) -> Graph:
    type = f"f32[{size},{size}]"
    return parse(f"graph(%x: {type}) {{\n  %y: {type} = jax.dot_general(%x, %x) {{{DOT}}}\n  return %y\n}}")


class Told(Meter):
    """A meter whose measurements are `factor` times the estimates; it records the measured units."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.measured = factor, list[str]()

    def _measured(self, part: Graph, name: str) -> UnitCost:
        self.measured.append(str(part.inputs[0].type))
        works = [work_of(node) for node in part.nodes]
        return UnitCost(works[0], self.factor * self.rates(name).seconds(works[0]), 8)


def test_what_weighs_most_is_measured_first_and_a_small_rest_is_estimated_at_the_rates_found() -> None:
    meter = Told(3.0)
    sizes = [16, 512, 16, 1024, 512]
    prices = meter.prices([square(size) for size in sizes], ("cpu:0", "cpu:0"), 60.0)
    assert meter.measured == ["f32[1024,1024]", "f32[512,512]"]
    for size, price in zip(sizes, prices, strict=True):
        expected = 3.0 * meter.estimate(square(size).nodes[0], "cpu:0")
        assert price.seconds == pytest.approx((expected, expected))
        assert price.scratch_bytes == (0 if size == 16 else 8)
    meter.prices([square(size) for size in sizes], ("cpu:0",), 60.0)
    assert len(meter.measured) == 2


def test_many_equal_small_parts_weigh_as_much_as_they_take_together() -> None:
    meter = Told(1.0)
    meter.prices([square(64)] * 5000 + [square(256)], ("cpu:0",), 60.0)
    assert meter.measured[0] == "f32[64,64]"


def test_a_call_is_timed_among_others_in_a_row_each_on_what_the_one_before_gave() -> None:
    now, waits = 0.0, list[float]()

    def call(given: float) -> float:
        nonlocal now
        now += 1e-4
        waits.append(given)
        return given + 1

    assert Meter(clock=lambda: now)._in_a_row(call, 0.0) == pytest.approx(1e-4)
    assert all(later in (0.0, earlier + 1) for earlier, later in pairwise(waits))
    # One call to warm up, one to count, and four equal rows of 2 ms, the first of them to warm up.
    assert len(waits) == pytest.approx(2 + 4 * 20, abs=4)
    assert waits.count(0.0) == 6


def test_what_takes_long_is_run_twice() -> None:
    now, calls = 0.0, 0

    def call(given: float) -> float:
        nonlocal now, calls
        now, calls = now + 1.0, calls + 1
        return given

    assert Meter(clock=lambda: now)._in_a_row(call, 0.0) == 1.0
    assert calls == 2


def test_a_device_that_is_not_measured_in_time_is_named_with_the_deadline() -> None:
    message = (
        "cpu:0 was to be measured, but the 0.0001 s for measuring the devices of this process are over\n  at .*\n"
        "  something else keeps them busy; place the ops by name, as in dflow.device\\('cpu:0'\\)"
    )
    with pytest.raises(DeadlineExceeded, match=f"^{message}$"):
        Meter(deadline_s=1e-4, clock=ticking()).machine(("cpu:0",))
