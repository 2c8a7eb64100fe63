"""Fuse the units of a device between transfers into calls, as `passes/cluster.py` makes XLA calls of nodes.

A unit's level is the number of transfers on the longest path to it. The units of one device and level form one call; or
two, if other devices wait for some of them. Then the first call has these units, the units that they depend on, and all
that touch state; the second has the rest, if it is long. A call starts when the operands of all its units are ready,
and its results are ready when all its units have run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflow.lowering.placement.problem import Assignment, Problem, Unit

#: The rest is a separate call if it takes at least this time, in s.
LEAST_S = 1e-4
#: Device, level, and whether it is the rest.
_Call = tuple[int, int, bool]


def as_calls(problem: Problem, assignment: Sequence[int]) -> tuple[Problem, Assignment, tuple[int, ...]]:
    """Return the problem whose units are the calls of an assignment, their devices, and the call of each unit."""
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
    devices = tuple(device for device, _, _ in order)
    return Problem(problem.machine, units, values), devices, of_unit


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
        tuple(sum(seconds) for seconds in zip(*(unit.seconds for unit in units), strict=True)),
        tuple(takes),
        tuple(after),
        tuple(problem.machine.devices),
        max(unit.scratch_bytes for unit in units),
        sum(unit.state_bytes for unit in units),
        any(unit.touches_state for unit in units),
    )


def _calls(problem: Problem, assignment: Sequence[int]) -> list[_Call]:
    """Return the call of each unit: the units that other devices wait for, with all that they need, come first."""
    levels = [0] * len(problem.units)
    for number, needed in enumerate(problem.predecessors):
        device = assignment[number]
        for earlier in needed:
            levels[number] = max(levels[number], levels[earlier] + (assignment[earlier] != device))
    sites = list(zip(assignment, levels, strict=True))
    first = {
        number
        for number, device in enumerate(assignment)
        if any(assignment[later] != device for later in problem.successors[number])
    }
    _add_needed(problem, sites, first)
    stateful = {sites[number] for number in first if problem.units[number].touches_state}
    first |= {n for n, unit in enumerate(problem.units) if unit.touches_state and sites[n] in stateful}
    _add_needed(problem, sites, first)
    rest = dict.fromkeys(sites, 0.0)
    for number, (device, level) in enumerate(sites):
        if number not in first:
            rest[device, level] += problem.units[number].seconds[device]
    return [(*site, number not in first and rest[site] >= LEAST_S) for number, site in enumerate(sites)]


def _add_needed(problem: Problem, sites: Sequence[tuple[int, int]], found: set[int]) -> None:
    """Add the units of the same device and level on which units in `found` depend."""
    for number in reversed(range(len(problem.units))):
        if number in found:
            found.update(earlier for earlier in problem.predecessors[number] if sites[earlier] == sites[number])
