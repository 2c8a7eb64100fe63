"""Simulate one step of an assignment: when each unit runs, when each value moves, and the memory used.

A device runs one unit at a time: of the ready ones the first in the list, as a step does. Devices of one pool slow each
other down by the machine's `speeds`. A value is sent once to each other device that needs it, as soon as it is ready. A
link carries one value at a time, the first ready value first. Memory is counted over half-open intervals: a result from
the start of its unit, a copy from the start of its transfer, both to the end of their last use.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from dflow.lowering.placement.problem import Problem


class Transfer(NamedTuple):
    """The transfer of a value from one device to another."""

    value: int
    source: int
    destination: int
    start_s: float
    end_s: float


class Prediction(NamedTuple):
    """The predicted step of an assignment.

    `step_s`           time until every unit has run
    `busy_s`           busy time of each device
    `peak_bytes`       largest memory in use on each device, including variables
    `start_s`,`end_s`  start and end of each unit
    `transfers`        the transfers between devices
    """

    step_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    transfers: tuple[Transfer, ...]


def simulate(problem: Problem, assignment: Sequence[int], *, with_memory: bool = True) -> Prediction:
    """Return the predicted step of `assignment`; without memory, `peak_bytes` is all 0."""
    run = _SimulatedStep(problem, assignment)
    run.to_the_end()
    peak = _peaks(problem, assignment, run) if with_memory else (0,) * len(problem.machine.names)
    return Prediction(
        max([0.0, *run.end]),
        tuple(run.busy),
        peak,
        tuple(run.start),
        tuple(run.end),
        tuple(run.transfers),
    )


class _SimulatedStep:
    """The state of a simulation.

    Events are `(time, unit, turn)` for the end of a unit and `(time, -1 - index of the transfer, 0)` for that of a
    transfer. `turn` counts the changes of a device's running unit or speed: an end with an older count is void.
    """

    def __init__(self, problem: Problem, assignment: Sequence[int]) -> None:
        self.problem, self.assignment = problem, assignment
        machine, units = problem.machine, problem.units
        self.start, self.end = [0.0] * len(units), [0.0] * len(units)
        self.busy = [0.0] * len(machine.names)
        self.transfers: list[Transfer] = []
        #: By value and device, the time at which the value arrives there.
        self.there: list[dict[int, float]] = [{} for _ in problem.values]
        self._waits = [len(unit.takes) + len(unit.after) for unit in units]
        self._ready: list[list[int]] = [[] for _ in machine.names]
        self._link_free: dict[tuple[int, int], float] = {}
        self._events: list[tuple[float, int, int]] = []
        #: By device: the running unit, its remaining seconds at full speed at the time `_since`, and the speed now.
        self._running: list[int | None] = [None] * len(machine.names)
        self._left = [0.0] * len(machine.names)
        self._since = [0.0] * len(machine.names)
        self._speed = [1.0] * len(machine.names)
        self._turn = [0] * len(machine.names)

    def to_the_end(self) -> None:
        for number, waits in enumerate(self._waits):
            if not waits:
                self._is_ready(number)
        for number, value in enumerate(self.problem.values):
            if value.producer is None:
                assert value.source is not None
                self._made(number, value.source, 0.0)
        events, now = self._events, 0.0
        while True:
            while events and events[0][0] == now:
                _, what, turn = heapq.heappop(events)
                if what < 0:
                    self._there(self.transfers[-1 - what].value, self.transfers[-1 - what].destination, now)
                elif turn == self._turn[self.assignment[what]]:
                    self._ended(what, now)
            self._start_units(now)
            if not events:
                break
            now = events[0][0]

    def _start_units(self, now: float) -> None:
        for device, ready in enumerate(self._ready):
            if ready and self._running[device] is None:
                self._running[device] = number = heapq.heappop(ready)
                self._left[device] = self.problem.cost(number, device)
                self._since[device] = self.start[number] = now
                self._speed[device] = 0.0
        self._pace(now)

    def _pace(self, now: float) -> None:
        """Schedule new ends for the running units whose speed changes now."""
        machine = self.problem.machine
        working = [0] * len(machine.speeds)
        for device, number in enumerate(self._running):
            working[machine.pools[device]] += number is not None
        for device, number in enumerate(self._running):
            speed = machine.speed(machine.pools[device], working[machine.pools[device]])
            if number is not None and speed != self._speed[device]:
                self._left[device] = max(0.0, self._left[device] - (now - self._since[device]) * self._speed[device])
                self._since[device], self._speed[device] = now, speed
                self._turn[device] += 1
                heapq.heappush(self._events, (now + self._left[device] / speed, number, self._turn[device]))

    def _ended(self, number: int, now: float) -> None:
        device = self.assignment[number]
        self._running[device] = None
        self._turn[device] += 1
        self.end[number] = now
        self.busy[device] += now - self.start[number]
        for value in self.problem.gives[number]:
            self._made(value, device, now)
        for follower in self.problem.followers[number]:
            self._one_less(follower)

    def _made(self, value: int, device: int, now: float) -> None:
        problem, assignment = self.problem, self.assignment
        moved, takers = problem.values[value], problem.takers[value]
        wanted = {assignment[taker] for taker in takers}
        self._there(value, device, now)
        for other in sorted(wanted - {device}):
            link = problem.machine.links[device][other]
            begin = max(now, self._link_free.get((device, other), 0.0))
            self._link_free[device, other] = begin + link.occupied_s(moved.size_bytes)
            end = begin + link.seconds(moved.size_bytes)
            self.transfers.append(Transfer(value, device, other, begin, end))
            heapq.heappush(self._events, (end, -len(self.transfers), 0))

    def _there(self, value: int, device: int, now: float) -> None:
        self.there[value][device] = now
        for taker in self.problem.takers[value]:
            if self.assignment[taker] == device:
                self._one_less(taker)

    def _one_less(self, number: int) -> None:
        self._waits[number] -= 1
        if not self._waits[number]:
            self._is_ready(number)

    def _is_ready(self, number: int) -> None:
        heapq.heappush(self._ready[self.assignment[number]], number)


def _peaks(problem: Problem, assignment: Sequence[int], run: _SimulatedStep) -> tuple[int, ...]:
    count = len(problem.machine.names)
    always = [0] * count
    changes: list[list[tuple[float, int]]] = [[] for _ in range(count)]

    def holds(device: int, start: float, end: float, size: int) -> None:
        if size:
            changes[device] += [(start, size), (end, -size)]

    for number, unit in enumerate(problem.units):
        always[assignment[number]] += unit.state_bytes
        holds(assignment[number], run.start[number], run.end[number], unit.scratch_bytes)
    begun = {(move.value, move.destination): move.start_s for move in run.transfers}
    last = _last_uses(problem, assignment, run)
    for number, value in enumerate(problem.values):
        for device in run.there[number]:
            if value.producer is None and device == value.source:
                always[device] += value.size_bytes  # the caller keeps it
                continue
            start = begun.get((number, device), run.start[value.producer] if value.producer is not None else 0.0)
            holds(device, start, last[number, device], value.size_bytes)
    return tuple(base + most_held(sorted(change)) for base, change in zip(always, changes, strict=True))


def _last_uses(problem: Problem, assignment: Sequence[int], run: _SimulatedStep) -> dict[tuple[int, int], float]:
    last = {(value, device): time for value, times in enumerate(run.there) for device, time in times.items()}
    for number, unit in enumerate(problem.units):
        for value in unit.takes:
            key = value, assignment[number]
            last[key] = max(last[key], run.end[number])
    for move in run.transfers:
        key = move.value, move.source
        last[key] = max(last[key], move.end_s)
    for number, moved in enumerate(problem.values):
        if moved.is_output and moved.producer is not None:
            last[number, assignment[moved.producer]] = float("inf")
    return last


def most_held(changes: Sequence[tuple[float, int]]) -> int:
    """Return the largest sum at any time. At equal times sorting puts ends (negative sizes) before starts."""
    most = held = 0
    for _, size in changes:
        held += size
        most = max(most, held)
    return most
