"""A simulation of a step by the direct method: each event looks at all units, and memory is summed between any two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from dflow.lowering.placement.problem import Problem


class Slow(NamedTuple):
    step_s: float
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]


def slow_simulation(problem: Problem, assignment: Sequence[int]) -> Slow:
    """Like `simulate`, slowly."""
    units, values, machine = problem.units, problem.values, problem.machine
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    left: dict[int, float] = {}
    there: dict[tuple[int, int], float] = {}
    moves: list[tuple[int, int, int, float, float]] = []
    now = 0.0

    def wanted_at(value: int) -> set[int]:
        return {assignment[number] for number, unit in enumerate(units) if value in unit.takes}

    def appear(value: int, device: int) -> None:
        there[value, device] = now
        for other in sorted(wanted_at(value) - {device}):
            link = machine.links[device][other]
            earlier = [
                begin + values[moved].size_bytes / link.bytes_per_s
                for moved, source, target, begin, _ in moves
                if (source, target) == (device, other)
            ]
            begin = max([now, *earlier])
            moves.append(
                (value, device, other, begin, begin + (link.latency_s + values[value].size_bytes / link.bytes_per_s))
            )

    def settle() -> None:
        """Apply all events that happen now."""
        changed = True
        while changed:
            changed = False
            for number in sorted(left):
                if left[number] == 0 and number not in end:
                    end[number] = now
                    changed = True
                    for value in range(len(values)):
                        if values[value].producer == number:
                            appear(value, assignment[number])
            for value, _, target, _, arrival in moves:
                if arrival == now and (value, target) not in there:
                    there[value, target] = now
                    changed = True

    for value, moved in enumerate(values):
        if moved.source is not None:
            appear(value, moved.source)
    while True:
        settle()
        ready = [
            number
            for number, unit in enumerate(units)
            if number not in start
            and all((value, assignment[number]) in there for value in unit.takes)
            and all(earlier in end for earlier in unit.after)
        ]
        started = False
        for device in machine.devices:
            running = [number for number in start if number not in end and assignment[number] == device]
            here = [number for number in ready if assignment[number] == device]
            if here and not running:
                number = min(here)
                start[number] = now
                left[number] = problem.cost(number, device)
                started = True
        if started:
            continue
        speeds = {}
        for number in left:
            if number not in end:
                pool = machine.pools[assignment[number]]
                others = [n for n in left if n not in end and machine.pools[assignment[n]] == pool]
                speeds[number] = machine.speed(pool, len(others))
        coming = [now + left[number] / speed for number, speed in speeds.items()]
        coming += [move[4] for move in moves if (move[0], move[2]) not in there]
        if not coming:
            break
        for number, speed in speeds.items():
            left[number] -= (min(coming) - now) * speed
        now = min(coming)
    starts, ends = ([times[number] for number in range(len(units))] for times in (start, end))
    peak = _peak(problem, assignment, starts, ends, there, moves)
    return Slow(max([0.0, *ends]), tuple(starts), tuple(ends), peak)


def _peak(
    problem: Problem,
    assignment: Sequence[int],
    start: Sequence[float],
    end: Sequence[float],
    there: dict[tuple[int, int], float],
    moves: Sequence[tuple[int, int, int, float, float]],
) -> tuple[int, ...]:
    times = sorted({*start, *end, *(m[3] for m in moves), *(m[4] for m in moves)})
    moments = [(one + other) / 2 for one, other in pairwise(times)] + [max(times, default=0.0) + 1]
    peak = [0] * len(problem.machine.names)
    for moment in moments:
        for device in problem.machine.devices:
            held = 0
            for number, unit in enumerate(problem.units):
                if assignment[number] == device:
                    held += unit.state_bytes + (unit.scratch_bytes if start[number] < moment < end[number] else 0)
            for value, moved in enumerate(problem.values):
                if (value, device) in there and _is_held(problem, assignment, value, device, moment, start, end, moves):
                    held += moved.size_bytes
            peak[device] = max(peak[device], held)
    return tuple(peak)


def _is_held(
    problem: Problem,
    assignment: Sequence[int],
    value: int,
    device: int,
    moment: float,
    start: Sequence[float],
    end: Sequence[float],
    moves: Sequence[tuple[int, int, int, float, float]],
) -> bool:
    moved = problem.values[value]
    if moved.source == device:
        return True
    here = moved.producer is not None and assignment[moved.producer] == device
    if here:
        assert moved.producer is not None
        begin, last = start[moved.producer], end[moved.producer]
    else:
        begin, last = next((m[3], m[4]) for m in moves if m[0] == value and m[2] == device)
    uses = [end[n] for n, unit in enumerate(problem.units) if value in unit.takes and assignment[n] == device]
    uses += [m[4] for m in moves if m[0] == value and m[1] == device]
    if moved.is_output and here:
        uses.append(float("inf"))
    return begin < moment < max([last, *uses])
