"""Regions of an assignment, connected parts on one device, and the other devices that each could be on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dflow.lowering.placement.problem import Assignment, Problem
from dflow.lowering.placement.score import Scored, scored


class Alternative(NamedTuple):
    """The best other device for a region, and the time in s that it adds to a step."""

    region: tuple[int, ...]
    device: int
    loss_s: float


def regions(problem: Problem, assignment: Assignment) -> list[tuple[int, ...]]:
    """Return the blocks that have a choice of devices, grouped into connected blocks on one device."""
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
    """Return the assignment with those of these blocks on `device` that may run there."""
    new = list(assignment)
    for block in blocks:
        if device in problem.choices[block]:
            for unit in problem.together[block]:
                new[unit] = device
    return tuple(new)


def alternatives(problem: Problem, assignment: Assignment) -> list[Alternative]:
    """Return the next best device of each region, with all else unchanged."""
    base, found = scored(problem, assignment).step_s, []
    for region in regions(problem, assignment):
        others = [(scored(problem, new).score, device) for device, new in _moves(problem, assignment, region)]
        (_, step_s), device = min(others)
        found.append(Alternative(region, device, step_s - base))
    return found


def better(problem: Problem, best: Scored) -> Scored | None:
    """Return a better assignment that differs by the move of one block or region; None if there is none."""
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
