"""Clocks are aligned so that no value is received before it was sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.observe.clock_alignment import ClockSample, Crossing, Offset, align

TASKS = ("ps:0", "ps:1", "worker:0")
DELAY_NS = st.integers(1, 200_000)
MOMENT_NS = st.integers(0, 10**9)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, list[ClockSample]], list[Crossing]]:
    """Clocks with equal rates and any offsets, with random delays of round trips and values."""
    offsets = {task: draw(st.integers(-(10**15), 10**15)) for task in TASKS}
    samples = {}
    for task in TASKS:
        trips = draw(st.lists(st.tuples(MOMENT_NS, DELAY_NS, DELAY_NS), min_size=1, max_size=5))
        samples[task] = [(at, at + there + offsets[task], at + there + back) for at, there, back in trips]
    crossings = []
    for source, destination, at, delay in draw(
        st.lists(st.tuples(st.sampled_from(TASKS), st.sampled_from(TASKS), MOMENT_NS, DELAY_NS.map(lambda d: d + 1)))
    ):
        crossings.append((source, at + offsets[source], destination, at + delay + offsets[destination]))
    return offsets, samples, crossings


@given(worlds())
def test_each_value_is_sent_before_it_is_received_and_the_truth_is_within_the_error(
    world: tuple[dict[str, int], dict[str, list[ClockSample]], list[Crossing]],
) -> None:
    offsets, samples, crossings = world
    found = align(samples, crossings)
    for task in TASKS:
        assert abs(found[task].offset_ns - offsets[task]) <= found[task].error_ns + 1
        assert found[task].error_ns <= min((heard_ns - asked_ns + 1) // 2 for asked_ns, _, heard_ns in samples[task])
    for source, sent_ns, destination, received_ns in crossings:
        assert sent_ns - found[source].offset_ns < received_ns - found[destination].offset_ns


def test_values_tell_more_than_slow_round_trips_do() -> None:
    samples = {"a": [(0, 500, 1000)], "b": [(0, 500, 1000)]}
    assert align(samples, []) == {"a": Offset(0, 500), "b": Offset(0, 500)}
    both_ways = [("a", 0, "b", 10), ("b", 20, "a", 30)]
    found = align(samples, both_ways)
    assert -10 <= found["a"].offset_ns - found["b"].offset_ns <= 10


def test_a_clock_that_drifts_is_taken_by_its_shortest_round_trip() -> None:
    drifting = {"a": [(0, 1000, 100), (10_000, 21_000, 10_020)]}
    assert align(drifting, []) == {"a": Offset(21_000 - 10_010, 10)}


def test_values_that_cannot_be_are_passed_over() -> None:
    samples = {"a": [(0, 5, 10)], "b": [(0, 5, 10)]}
    impossible = [("a", 1000, "b", 0), ("c", 0, "a", -1)]
    assert align(samples, impossible) == align(samples, [])
