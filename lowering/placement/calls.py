"""The units of a device that run as one: those between transfers are fused into XLA calls, as `passes/cluster.py` does.

A unit's level is how many transfers what it needs has come through. The units of one device and level make two calls:
first those that other devices wait for, and what these are made of; then the rest. A call waits for all that any of
its units takes, and what it gives is there when all of it has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflow.lowering.placement.problem import Assignment, Problem, Unit

#: Device, level, and whether it is the rest.
_Call = tuple[int, int, bool]


def as_calls(problem: Problem, assignment: Sequence[int]) -> tuple[Problem, Assignment, tuple[int, ...]]:
    """The problem of the calls of an assignment, their devices, and for each unit the number of its call."""
    calls = _calls(problem, assignment)
    order = sorted(set(calls), key=lambda call: (call[1], call[2], call[0]))
    number_of = {call: number for number, call in enumerate(order)}
    of_unit = tuple(number_of[call] for call in calls)
    members: list[list[int]] = [[] for _ in order]
    for unit, call in enumerate(of_unit):
        members[call].append(unit)
    units = tuple(_joined(problem, of_unit, call, of_call) for call, of_call in enumerate(members))
    values = tuple(
        replace(value, producer=of_unit[value.producer]) if value.producer is not None else value
        for value in problem.values
    )
    together = tuple((call,) for call in range(len(order)))
    devices = tuple(device for device, _, _ in order)
    return Problem(problem.machine, units, values, together), devices, of_unit


def _joined(problem: Problem, of_unit: Sequence[int], call: int, members: Sequence[int]) -> Unit:
    units = [problem.units[number] for number in members]
    takes: dict[int, None] = {}
    after: dict[int, None] = {}
    for unit in units:
        for value in unit.takes:
            producer = problem.values[value].producer
            if producer is None or of_unit[producer] != call:
                takes[value] = None
        after.update((of_unit[earlier], None) for earlier in unit.after if of_unit[earlier] != call)
    return Unit(
        units[0].name,
        tuple(sum(seconds) for seconds in zip(*(unit.seconds for unit in units), strict=True)),
        tuple(takes),
        tuple(after),
        tuple(problem.machine.devices),
        max(unit.scratch_bytes for unit in units),
        sum(unit.state_bytes for unit in units),
    )


def _calls(problem: Problem, assignment: Sequence[int]) -> list[_Call]:
    levels = [0] * len(problem.units)
    for number, needed in enumerate(problem.predecessors):
        device = assignment[number]
        for earlier in needed:
            levels[number] = max(levels[number], levels[earlier] + (assignment[earlier] != device))
    awaited = [False] * len(problem.units)
    for number in reversed(range(len(problem.units))):
        device, level = assignment[number], levels[number]
        for later in problem.successors[number]:
            is_same = assignment[later] == device and levels[later] == level
            if assignment[later] != device or (is_same and awaited[later]):
                awaited[number] = True
                break
    return [(assignment[number], levels[number], not awaited[number]) for number in range(len(problem.units))]
