"""How far the clocks of tasks are from ours, from round trips and from the values they sent to each other.

Each round trip bounds a clock from both sides, as in NTP: what it was told between asking and hearing. Each value
bounds one clock by another: it was sent before it was received. All of these are differences of two unknowns, so
shortest paths give the greatest and the least offsets that agree with all; what lies halfway agrees too, for the set of
all that do is convex. So in a trace that is aligned by these no value is received before it was sent.

Clocks that drift while they are watched may leave nothing that agrees; then the values, and at last all but the
shortest round trip, are left out, and an order of less than the error means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

OURS = ""


class ClockSample(NamedTuple):
    """We asked at `asked_ns` and heard at `heard_ns`, by our clock, that the other one was at `told_ns`."""

    asked_ns: int
    told_ns: int
    heard_ns: int


class Crossing(NamedTuple):
    """A value left `source` at `sent_ns` and reached `destination` at `received_ns`, each by its own clock."""

    source: str
    sent_ns: int
    destination: str
    received_ns: int


class Offset(NamedTuple):
    """A clock is `offset_ns` ahead of ours, give or take `error_ns`."""

    offset_ns: int
    error_ns: int


_Bounds = Mapping[tuple[str, str], int]


def align(samples: Mapping[str, Sequence[ClockSample]], crossings: Iterable[Crossing]) -> dict[str, Offset]:
    """The offset of each clock that was asked at least once."""
    by_trips = _bounds_of_trips(samples)
    if any(by_trips[OURS, task] + by_trips[task, OURS] < 0 for task in samples):
        return {task: _by_shortest(found) for task, found in samples.items()}
    for bounds in (by_trips | _bounds_of_crossings(samples, crossings, by_trips), by_trips):
        greatest = _shortest_paths(bounds, samples)
        least = _shortest_paths({(end, start): bound for (start, end), bound in bounds.items()}, samples)
        if greatest is not None and least is not None:
            return {
                task: Offset((greatest[task] - least[task]) // 2, -((-greatest[task] - least[task]) // 2))
                for task in samples
            }
    return {task: _by_shortest(found) for task, found in samples.items()}


def _bounds_of_trips(samples: Mapping[str, Sequence[ClockSample]]) -> dict[tuple[str, str], int]:
    """By (one, other): how much the other's offset may at most exceed the one's; ours is 0."""
    found = {}
    for task, trips in samples.items():
        found[OURS, task] = min(trip.told_ns - trip.asked_ns for trip in trips)
        found[task, OURS] = min(trip.heard_ns - trip.told_ns for trip in trips)
    return found


def _bounds_of_crossings(
    samples: Mapping[str, Sequence[ClockSample]], crossings: Iterable[Crossing], others: _Bounds
) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for crossing in crossings:
        key = (crossing.source, crossing.destination)
        if key[0] in samples and key[1] in samples and key[0] != key[1]:
            # One less, so that it holds of halves that were rounded.
            bound = crossing.received_ns - crossing.sent_ns - 1
            found[key] = min(found.get(key, bound), bound, others.get(key, bound))
    return found


def _shortest_paths(bounds: _Bounds, tasks: Iterable[str]) -> dict[str, int] | None:
    """The shortest way from ours to each task; None when there is a circle that gets ever shorter."""
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
    best = min(trips, key=lambda trip: trip.heard_ns - trip.asked_ns)
    halfway, took = (best.asked_ns + best.heard_ns) // 2, best.heard_ns - best.asked_ns
    return Offset(best.told_ns - halfway, -(-took // 2))
