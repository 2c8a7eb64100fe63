"""Choose an assignment: the best of simple and greedy ones, improved by local search.

In the simulation it is never worse than all units on any one device. For small problems all assignments are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dflow.lowering.placement.exhaustive import exhaustive, size
from dflow.lowering.placement.greedy import greedy
from dflow.lowering.placement.problem import Assignment, Problem
from dflow.lowering.placement.regions import better
from dflow.lowering.placement.score import Scored, predicted, scored
from dflow.lowering.placement.search import search
from dflow.tracing.errors import DeviceError

#: Problems of at most this number of assignments are searched exhaustively.
SMALL = 1024
#: Number of iterations of the local search, unless it is ended earlier.
TURNS = 4000
#: Number of starting points of local searches, which share the iterations.
SEARCHES = 4


def choose(
    problem: Problem,
    *,
    turns: int = TURNS,
    seed: int = 0,
    is_over: Callable[[], bool] = lambda: False,
    exhaustive_up_to: int = SMALL,
) -> Scored:
    """Return the best assignment found; the same for the same arguments, unless `is_over` ends the search.

    For a problem with at most `exhaustive_up_to` assignments it is the optimum.
    Raises DeviceError if no assignment keeps units of a block together, or none was found that fits into the memory.
    """
    _check_together(problem)
    _check_state(problem)
    if size(problem) <= exhaustive_up_to:
        best = exhaustive(problem)
    else:
        best = _searched(problem, turns, seed, is_over)
    if best.score[0]:
        raise DeviceError(_too_much(problem, best.assignment))
    return best


def _searched(problem: Problem, turns: int, seed: int, is_over: Callable[[], bool]) -> Scored:
    starts = sorted({scored(problem, start) for start in starting_points(problem)})
    found = [
        search(problem, start.assignment, turns=turns // SEARCHES, seed=seed + number, is_over=is_over)
        for number, start in enumerate(starts[:SEARCHES])
    ]
    return _polished(problem, min(found), is_over)


def _polished(problem: Problem, best: Scored, is_over: Callable[[], bool]) -> Scored:
    """Return a local optimum, reached by moves of one block or region at a time, or the best until `is_over()`."""
    while not is_over():
        found = better(problem, best)
        if found is None:
            break
        best = found
    return best


def starting_points(problem: Problem) -> Iterator[Assignment]:
    """Yield starting points: all on one device, greedy ones, and the list of units cut into one part per device."""
    for device in problem.machine.devices:
        yield all_on(problem, device)
    for fills_gaps in (False, True):
        for looks_ahead in (False, True):
            yield greedy(problem, fills_gaps=fills_gaps, looks_ahead=looks_ahead)
    yield in_parts(problem)


def all_on(problem: Problem, device: int) -> Assignment:
    """Return the assignment with each block on `device` if it may run there, else on its first choice."""
    return problem.spread([device if device in choices else choices[0] for choices in problem.choices])


def in_parts(problem: Problem) -> Assignment:
    """Return the list of units cut into parts of about equal cost, one part per device."""
    total = sum(_cost(problem, number) for number in range(len(problem.units))) or 1.0
    count, done = len(problem.machine.names), 0.0
    devices = [-1] * len(problem.together)
    for number, block in enumerate(problem.block_of):
        if devices[block] < 0:
            wanted, choices = min(count - 1, int(done / total * count)), problem.choices[block]
            devices[block] = wanted if wanted in choices else choices[0]
        done += _cost(problem, number)
    return problem.spread(devices)


def _cost(problem: Problem, number: int) -> float:
    return min(problem.cost(number, device) for device in problem.units[number].devices)


def _check_together(problem: Problem) -> None:
    """Raise DeviceError for units of a block that have no device in common."""
    for block, choices in zip(problem.together, problem.choices, strict=True):
        if not choices:
            units, names = [problem.units[unit] for unit in block], problem.machine.names
            of_each = [f"{unit.name} on {', '.join(names[device] for device in unit.devices)}" for unit in units]
            raise DeviceError(
                f"these belong together, and may be on no one device: {'; '.join(of_each)}",
                "state one device for all of them, or none",
            )


def _check_state(problem: Problem) -> None:
    """Raise DeviceError if the variables of a device do not fit into its memory."""
    for device, limit in enumerate(problem.machine.limits):
        bound = [
            unit
            for block, choices in zip(problem.together, problem.choices, strict=True)
            if choices == (device,)
            for unit in block
        ]
        needed = sum(problem.units[unit].state_bytes for unit in bound)
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
