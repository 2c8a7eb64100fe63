"""Connected parts of an assignment that stand on one device, and where else each could be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dflow.lowering.placement.problem import Assignment, Problem
from dflow.lowering.placement.score import Scored, scored


class Alternative(NamedTuple):
    """Where else a region could be: the device with which a step is shortest then, and by how many s it is longer."""

    region: tuple[int, ...]
    device: int
    loss_s: float


def regions(problem: Problem, assignment: Assignment) -> list[tuple[int, ...]]:
    """The blocks of `together` that have a choice, those that are joined by values and on one device together."""
    movable = {block for block, choices in enumerate(problem.choices) if len(choices) > 1}
    leader = {block: block for block in movable}

    def find(block: int) -> int:
        while leader[block] != block:
            leader[block] = block = leader[leader[block]]
        return block

    for number, needed in enumerate(problem.predecessors):
        for earlier in needed:
            one, other = problem.block_of[earlier], problem.block_of[number]
            if one in movable and other in movable and assignment[earlier] == assignment[number]:
                leader[max(find(one), find(other))] = min(find(one), find(other))
    found: dict[int, list[int]] = {}
    for block in sorted(movable):
        found.setdefault(find(block), []).append(block)
    return [tuple(blocks) for blocks in found.values()]


def moved(problem: Problem, assignment: Assignment, blocks: Iterable[int], device: int) -> Assignment:
    """The assignment with these blocks on `device`, those of them that may be there."""
    new = list(assignment)
    for block in blocks:
        if device in problem.choices[block]:
            for unit in problem.together[block]:
                new[unit] = device
    return tuple(new)


def alternatives(problem: Problem, assignment: Assignment) -> list[Alternative]:
    """For each region the next best device, all else as it is."""
    base, found = scored(problem, assignment).step_s, []
    for region in regions(problem, assignment):
        others = [(scored(problem, new).score, device) for device, new in _moves(problem, assignment, region)]
        (_, step_s), device = min(others)
        found.append(Alternative(region, device, step_s - base))
    return found


def better(problem: Problem, best: Scored) -> Scored | None:
    """A better assignment that one move of a block, or of a region, leads to; None where there is none."""
    single = [(block,) for block, choices in enumerate(problem.choices) if len(choices) > 1]
    for blocks in (*regions(problem, best.assignment), *single):
        for _, new in _moves(problem, best.assignment, blocks):
            found = scored(problem, new)
            if found.score < best.score:
                return found
    return None


def _moves(problem: Problem, assignment: Assignment, blocks: tuple[int, ...]) -> Iterator[tuple[int, Assignment]]:
    for device in problem.machine.devices:
        new = moved(problem, assignment, blocks, device)
        if new != assignment:
            yield device, new
