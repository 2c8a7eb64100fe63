"""How the time of a step divides, from events whose clocks are set by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.observe.clock_alignment import Offset
from dflow.distributed.observe.step_times import Division, Interval, divide, message_times, step_times
from dflow.lowering.steps.step_events import (
    COMPUTED,
    ITEM_BEGAN,
    ITEM_ENDED,
    PART_BEGAN,
    PART_ENDED,
    RECEIVED,
    SENT,
    STEP_BEGAN,
    STEP_ENDED,
    Event,
)

WORKER, PS = "/job:worker/task:0", "/job:ps/task:0"
#: The clock of ps:0 is this much ahead.
AHEAD_US = 1_000_000
OFFSETS = {WORKER: Offset(0, 5), PS: Offset(1000 * AHEAD_US, 5)}

INTERVALS = st.lists(st.tuples(st.integers(-20, 120), st.integers(-20, 120)), max_size=4)


@given(st.tuples(*[INTERVALS] * 5), st.integers(0, 100))
def test_the_parts_add_up_to_the_step_and_each_moment_counts_once(
    found: tuple[list[Interval], ...], end_ns: int
) -> None:
    division = divide((0, end_ns), found)
    assert sum(division) == pytest.approx(end_ns / 1e3)
    expected = dict.fromkeys(Division._fields, 0)
    for at_ns in range(end_ns):
        running = {
            name: any(start <= at_ns < end for start, end in intervals)
            for name, intervals in zip(("xla", "sending", "python", "missing", "flying"), found, strict=True)
        }
        first = next((name for name in ("xla", "sending", "python") if running[name]), "")
        late = ("wire" if running["flying"] else "waiting") if running["missing"] else "python"
        expected[first or late] += 1
    assert division._asdict() == {name: pytest.approx(ns / 1e3) for name, ns in expected.items()}


def event(at_us: int, what: str, step: int = 1, **more: object) -> Event:
    return Event(1000 * at_us, what, WORKER, step, **more)  # type: ignore[arg-type]


def item(kind: str, number: int, began_us: int, ended_us: int, step: int = 1, **more: object) -> list[Event]:
    at = {"step": step, "kind": kind, "number": number, **more}
    return [event(began_us, ITEM_BEGAN, **at), event(ended_us, ITEM_ENDED, **at)]  # type: ignore[arg-type]


def at_worker(step: int = 1) -> list[Event]:
    """A step of 1,000 us: it awaits `w+1` until 300, computes until 700, and sends `g` from 720 to 750."""
    return [
        event(0, STEP_BEGAN, step),
        event(50, PART_BEGAN, step),
        *item("Recv", 0, 60, 310, step, name="w+1", peer=PS, values=2),
        event(300, RECEIVED, step, name="w+1", peer=PS, size_bytes=800),
        *item("Call", 1, 340, 400, step, name="%f"),
        event(700, COMPUTED, step, kind="Call", name="%f", number=1),
        *item("Send", 2, 410, 760, step, name="g", peer=PS, values=1),
        event(750, SENT, step, name="g", peer=PS, size_bytes=400, began_ns=720_000),
        event(770, PART_ENDED, step),
        event(1000, STEP_ENDED, step),
    ]


def at_ps(step: int = 1) -> list[Event]:
    """The part from 100 to 950: it sends `w+1` from 120 to 140, awaits `g` until 800, and updates until 900."""

    def here(at_us: int) -> int:
        return at_us + AHEAD_US

    return [
        event(here(100), PART_BEGAN, step),
        *item("Recv", 0, here(105), here(810), step, name="g", peer=WORKER, values=1),
        *item("Read", 1, here(106), here(110), step),
        *item("Send", 2, here(112), here(145), step, name="w+1", peer=WORKER, values=2),
        event(here(140), SENT, step, name="w+1", peer=WORKER, size_bytes=800, began_ns=1000 * here(120)),
        event(here(800), RECEIVED, step, name="g", peer=WORKER, size_bytes=400),
        *item("Call", 3, here(820), here(840), step, name="%done"),
        event(here(900), COMPUTED, step, kind="Call", name="%done", number=3),
        event(here(950), PART_ENDED, step),
    ]


def in_order(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda each: each.at_ns)


def test_a_step_divides_into_python_xla_sending_wire_and_waiting() -> None:
    events = {WORKER: in_order(at_worker()), PS: in_order(at_ps())}
    ps, worker = step_times(events, OFFSETS)
    assert (worker.task, worker.starters, worker.steps, worker.took_us) == (WORKER, "worker", 1, 1000.0)
    # Waiting: until `w+1` leaves ps:0 at 120, and from the end of the part at 770. Wire: from 120 to 300.
    assert worker.division == Division(python=60 + 40 + 20 + 20, xla=360, sending=30, wire=180, waiting=60 + 230)
    assert (worker.messages, worker.values, worker.size_bytes) == (1.0, 1.0, 400.0)
    assert (ps.task, ps.starters, ps.took_us) == (PS, "worker", 850.0)
    # Waiting: between the items, and until `g` leaves the worker at 720. Wire: from 720 to 800.
    assert ps.division == Division(python=5 + 4 + 13 + 20 + 50, xla=80, sending=20, wire=80, waiting=1 + 2 + 575)
    assert (ps.messages, ps.values, ps.size_bytes) == (1.0, 2.0, 800.0)


def test_messages_have_their_values_bytes_and_times_by_edge() -> None:
    events = {WORKER: in_order(at_worker()), PS: in_order(at_ps())}
    first, second = message_times(events, OFFSETS)
    assert (first.edge, first.source, first.destination) == ("w+1", PS, WORKER)
    assert (first.messages, first.values, first.size_bytes) == (1.0, 2.0, 800.0)
    assert (first.sending_us, first.arrival_us) == (20.0, 180.0)
    assert (second.edge, second.values, second.sending_us, second.arrival_us) == ("g", 1.0, 30.0, 80.0)


def test_the_messages_of_a_loops_iterations_are_of_one_edge() -> None:
    sends = [event(10 * turn, SENT, name=f"w@{turn}", peer=PS, size_bytes=4) for turn in range(3)]
    recv = item("Recv", 0, 0, 50, name="w", peer=WORKER, values=1)
    (found,) = message_times({WORKER: sends, PS: recv}, OFFSETS)
    assert (found.edge, found.messages, found.values, found.size_bytes) == ("w", 3.0, 1.0, 4.0)
    assert found.arrival_us is None


def test_the_slowest_and_the_fastest_quarter_of_the_steps_do_not_count() -> None:
    ends_us = [100, 900, 1000, 1100, 90_000]
    events = [
        one
        for step, end_us in enumerate(ends_us)
        for one in (event(100_000 * step, STEP_BEGAN, step), event(100_000 * step + end_us, STEP_ENDED, step))
    ]
    (found,) = step_times({WORKER: events}, OFFSETS)
    assert (found.steps, found.took_us) == (5, 1000.0)
    assert found.division == Division(python=1000.0)


def test_steps_that_tasks_of_different_jobs_started_are_separate() -> None:
    ours = [event(0, PART_BEGAN), event(10, PART_ENDED)]
    rounds = [Event(0, STEP_BEGAN, PS, 7), Event(40_000, STEP_ENDED, PS, 7)]
    found = step_times({PS: ours + rounds}, {PS: Offset(0, 0)})
    assert [(each.starters, each.took_us) for each in found] == [("ps", 40.0), ("worker", 10.0)]
