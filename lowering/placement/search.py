"""Choose an assignment: from two simple ones, move units as long as the simulated step gets shorter.

The simple ones are all units on the best single device, and the list of units cut into one part per device. A move puts
one unit or one region (connected units on one device) on another device, or swaps two units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from dflow.lowering.placement.calls import as_calls
from dflow.lowering.placement.problem import Assignment, Problem
from dflow.lowering.placement.simulate import Prediction, simulate
from dflow.tracing.errors import DeviceError

#: New devices of some units, by unit.
_Move = Mapping[int, int]


class Scored(NamedTuple):
    """An assignment and its score: the bytes of memory that it lacks, and its time in s. A smaller score is better."""

    score: tuple[int, float]
    assignment: Assignment

    @property
    def step_s(self) -> float:
        """The predicted time of a step."""
        return self.score[1]


def predicted(problem: Problem, assignment: Assignment, *, with_memory: bool = True) -> Prediction:
    """Return the predicted step of the assignment: that of its calls."""
    calls, devices, _ = as_calls(problem, assignment)
    return simulate(calls, devices, with_memory=with_memory)


def scored(problem: Problem, assignment: Assignment) -> Scored:
    """Return the assignment with its score, from the simulation."""
    limits = problem.machine.limits
    found = predicted(problem, assignment, with_memory=any(limit is not None for limit in limits))
    lacks = (peak - limit for peak, limit in zip(found.peak_bytes, limits, strict=True) if limit is not None)
    return Scored((sum(max(0, size) for size in lacks), found.step_s), assignment)


def choose(problem: Problem, *, is_over: Callable[[], bool] = lambda: False) -> Scored:
    """Return the best assignment found, in the simulation no worse than all units on any one device.

    It is the same for the same problem, unless `is_over` ends the search.
    Raises DeviceError if none was found that fits into the memory.
    """
    _check_state(problem)
    on_one = min(scored(problem, all_on(problem, device)) for device in problem.machine.devices)
    best = min(_improved(problem, start, is_over) for start in (on_one, scored(problem, in_parts(problem))))
    if best.score[0]:
        raise DeviceError(_too_much(problem, best.assignment))
    return best


def _improved(problem: Problem, best: Scored, is_over: Callable[[], bool]) -> Scored:
    """Return an assignment that no single move improves, or the best until `is_over()`; swaps where no shift helps."""
    moves = _shifts
    while True:
        before = best
        for move in moves(problem, before.assignment):
            if is_over():
                return best
            new = tuple(move.get(unit, device) for unit, device in enumerate(best.assignment))
            if new != best.assignment:
                best = min(best, scored(problem, new))
        if best == before and moves is _swaps:
            return best
        moves = _swaps if best == before else _shifts


def _shifts(problem: Problem, assignment: Assignment) -> Iterator[_Move]:
    for units in (*regions(problem, assignment), *((unit,) for unit in _movable(problem))):
        for device in problem.machine.devices:
            yield {unit: device for unit in units if device in problem.units[unit].devices}


def _swaps(problem: Problem, assignment: Assignment) -> Iterator[_Move]:
    for one, other in combinations(_movable(problem), 2):
        here, there = assignment[one], assignment[other]
        if here != there and there in problem.units[one].devices and here in problem.units[other].devices:
            yield {one: there, other: here}


def _movable(problem: Problem) -> list[int]:
    return [number for number, unit in enumerate(problem.units) if len(unit.devices) > 1]


def all_on(problem: Problem, device: int) -> Assignment:
    """Return the assignment with each unit on `device` if it may run there, else on its first choice."""
    return tuple(device if device in unit.devices else unit.devices[0] for unit in problem.units)


def in_parts(problem: Problem) -> Assignment:
    """Return the list of units cut into parts of about equal cost, one part per device."""
    costs = [min(problem.cost(number, device) for device in unit.devices) for number, unit in enumerate(problem.units)]
    total, count, done = sum(costs) or 1.0, len(problem.machine.names), 0.0
    devices = []
    for unit, cost in zip(problem.units, costs, strict=True):
        device = min(count - 1, int(done / total * count))
        devices.append(device if device in unit.devices else unit.devices[0])
        done += cost
    return tuple(devices)


def regions(problem: Problem, assignment: Assignment) -> list[tuple[int, ...]]:
    """Return the units that have a choice of devices, grouped into connected units on one device."""
    movable, found = _movable(problem), list[tuple[int, ...]]()
    left = set(movable)
    for first in movable:
        region, edge = [], [first] if first in left else []
        left.discard(first)
        while edge:
            unit = edge.pop()
            region.append(unit)
            near = {*problem.predecessors[unit], *problem.successors[unit]} & left
            edge += [other for other in near if assignment[other] == assignment[unit]]
            left.difference_update(edge)
        found += [tuple(sorted(region))] if region else []
    return found


def alternatives(problem: Problem, assignment: Assignment) -> list[tuple[tuple[int, ...], int, float]]:
    """Return each region, the next best device for it, all else unchanged, and the time in s that adds to a step."""
    base, found = scored(problem, assignment).step_s, []
    for region in regions(problem, assignment):
        others = []
        for device in problem.machine.devices:
            move = {unit: device for unit in region if device in problem.units[unit].devices}
            new = tuple(move.get(unit, now) for unit, now in enumerate(assignment))
            others += [(scored(problem, new).score, device)] if new != assignment else []
        (_, step_s), device = min(others)
        found.append((region, device, step_s - base))
    return found


def _check_state(problem: Problem) -> None:
    """Raise DeviceError if the variables of a device do not fit into its memory."""
    for device, limit in enumerate(problem.machine.limits):
        needed = sum(unit.state_bytes for unit in problem.units if unit.devices == (device,))
        if limit is not None and needed > limit:
            raise DeviceError(
                f"the variables on {problem.machine.names[device]} take {needed:,} bytes, but it has {limit:,}",
                "create some of them on another device",
            )


def _too_much(problem: Problem, assignment: Assignment) -> str:
    peaks = predicted(problem, assignment).peak_bytes
    over = [
        (peak - limit, device, limit)
        for device, (peak, limit) in enumerate(zip(peaks, problem.machine.limits, strict=True))
        if limit is not None
    ]
    _, device, limit = max(over)
    return (
        f"no placement was found that fits: of the best, {problem.machine.names[device]} needs {peaks[device]:,} bytes "
        f"at its peak, but it has {limit:,}\n"
        "  offer more devices, put variables on others, or make the batch smaller"
    )
