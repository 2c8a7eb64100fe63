"""Offsets of tasks' clocks from ours, computed from round trips and from the values that tasks sent to each other.

Each round trip bounds a clock from both sides, as in NTP: the time it reported lies between our request and its answer.
Each value bounds one clock by another: it was sent before it was received. All of these bound the difference of two
offsets, so shortest paths give the greatest and the least offsets that satisfy all bounds. Their midpoint satisfies
them too, since the set of solutions is convex. So in a trace aligned with it no value is received before it was sent.

If clocks drift during the trace, no offsets may satisfy all bounds. Then the values are ignored, and at last all but
the shortest round trip; an order of events closer than the error then means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

OURS = ""


#: A round trip, in ns: when we asked by our clock, what the other clock reported, and when we heard it by ours.
ClockSample = tuple[int, int, int]
#: A value: its source, when it left, its destination, and when it arrived there, in ns by the clock of each task.
Crossing = tuple[str, int, str, int]


class Offset(NamedTuple):
    """A clock is `offset_ns` ahead of ours, with an error of at most `error_ns`."""

    offset_ns: int
    error_ns: int


_Bounds = Mapping[tuple[str, str], int]


def align(samples: Mapping[str, Sequence[ClockSample]], crossings: Iterable[Crossing]) -> dict[str, Offset]:
    """Return the offset of each task's clock from ours.

    `samples`    at least one round trip for each task
    `crossings`  values, which narrow the offsets; all are ignored if they contradict each other or the round trips
    """
    by_trips = _bounds_of_trips(samples)
    for bounds in (by_trips | _bounds_of_crossings(samples, crossings), by_trips):
        greatest = _shortest_paths(bounds, samples)
        least = _shortest_paths({(end, start): bound for (start, end), bound in bounds.items()}, samples)
        if greatest is not None and least is not None:
            return {
                task: Offset((greatest[task] - least[task]) // 2, -((-greatest[task] - least[task]) // 2))
                for task in samples
            }
    return {task: _by_shortest(found) for task, found in samples.items()}


def _bounds_of_trips(samples: Mapping[str, Sequence[ClockSample]]) -> dict[tuple[str, str], int]:
    """By (one, other): upper bound of the other's offset minus the one's, in ns; our offset is 0."""
    found = {}
    for task, trips in samples.items():
        found[OURS, task] = min(told_ns - asked_ns for asked_ns, told_ns, _ in trips)
        found[task, OURS] = min(heard_ns - told_ns for _, told_ns, heard_ns in trips)
    return found


def _bounds_of_crossings(
    samples: Mapping[str, Sequence[ClockSample]], crossings: Iterable[Crossing]
) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for source, sent_ns, destination, received_ns in crossings:
        if source in samples and destination in samples and source != destination:
            # One less, so that it also holds for midpoints rounded to whole ns.
            bound = received_ns - sent_ns - 1
            found[source, destination] = min(found.get((source, destination), bound), bound)
    return found


def _shortest_paths(bounds: _Bounds, tasks: Iterable[str]) -> dict[str, int] | None:
    """Return by task the length in ns of the shortest path from our clock; None when the bounds contradict each other.

    The length is the greatest offset of the task's clock that all bounds allow.
    """
    length = {OURS: 0} | {task: bounds[OURS, task] for task in tasks}
    for _ in range(len(length) + 1):
        is_shortest = True
        for (start, end), bound in bounds.items():
            if length[start] + bound < length[end]:
                length[end] = length[start] + bound
                is_shortest = False
        if is_shortest:
            return length
    return None


def _by_shortest(trips: Sequence[ClockSample]) -> Offset:
    asked_ns, told_ns, heard_ns = min(trips, key=lambda trip: trip[2] - trip[0])
    return Offset(told_ns - (asked_ns + heard_ns) // 2, -((asked_ns - heard_ns) // 2))
