from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from dflow.lowering.placement.instance import part
from dflow.lowering.placement.measure import Meter
from dflow.tracing.errors import DeadlineExceeded
from dflow.tracing.graph import Graph
from dflow.tracing.text import parse

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
    """A clock that goes on by as much each time it is read."""
    ticks: Iterator[int] = count()
    return lambda: next(ticks) * step_s


def parts_of(graph: Graph) -> list[Graph]:
    return [part(graph, [node]) for node in graph.nodes]


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
    read, first, second, update, bits = meter.prices(parts_of(parse(TWICE)), ("cpu:0", "cpu:0"))
    assert read.seconds == (0.0, 0.0)
    assert first == second
    assert first.seconds[0] == first.seconds[1] >= 0
    assert update.seconds[0] >= 0
    # A key is nothing that can be made from zeros and ones: estimated by the bytes.
    assert bits.seconds[0] == meter.estimate(parse(TWICE).nodes[-1], "cpu:0")


def test_what_the_time_does_not_allow_to_be_measured_is_estimated() -> None:
    graph, meter = parse(TWICE), Meter(clock=ticking(0.1))
    prices = meter.prices(parts_of(graph), ("cpu:0",), deadline_s=0.0)
    assert [price.seconds[0] for price in prices] == [meter.estimate(node, "cpu:0") for node in graph.nodes]


def test_a_device_that_is_not_measured_in_time_is_named_with_the_deadline() -> None:
    message = (
        "cpu:0 was to be measured, but the 0.0001 s for measuring the devices of this process are over\n"
        "  something else keeps them busy; place the ops by name, as in dflow.device('cpu:0')"
    )
    with pytest.raises(DeadlineExceeded, match=f"^{re.escape(message)}$"):
        Meter(deadline_s=1e-4, clock=ticking()).machine(("cpu:0",))
