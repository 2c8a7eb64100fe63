"""Local search: from an assignment to better ones by moving single units and connected groups.

Each iteration moves some of the units to another device. It keeps the result if that is no worse or, early on, slightly
worse (simulated annealing). The moves are drawn from a seed, so the same seed and number of iterations give the same
result, unless `is_over` ends the search earlier.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from dflow.lowering.placement.problem import Assignment, Problem
from dflow.lowering.placement.score import Scored, scored
from dflow.lowering.placement.simulate import Prediction, simulate

#: Initial temperature, as part of the time of a step: a result worse by this is kept with probability 1/e.
WARMTH = 0.1
#: A move of a group has at most this number of blocks.
LARGEST_GROUP = 12


def search(
    problem: Problem,
    start: Assignment,
    *,
    turns: int,
    seed: int = 0,
    is_over: Callable[[], bool] = lambda: False,
) -> Scored:
    """Return the best assignment found, never worse than `start`.

    The search ends after `turns` iterations, or when `is_over()` is true before one.
    """
    movable = [block for block, choices in enumerate(problem.choices) if len(choices) > 1]
    best = current = scored(problem, start)
    seen = {start: best}
    if not movable:
        return best
    moves = _Moves(problem, random.Random(seed), movable)
    chance = random.Random(seed + 1)
    for turn in range(turns):
        if is_over():
            break
        drawn = moves.draw(current.assignment)
        found = seen[drawn] = seen.get(drawn) or scored(problem, drawn)
        warmth = WARMTH * best.step_s * (1 - turn / turns) ** 2
        if _is_kept(found, current, warmth, chance.random()):
            current = found
        if found.score < best.score:
            best = found
        elif turn % 400 == 399 and current.score > best.score:
            current = best
    return best


def _is_kept(found: Scored, current: Scored, warmth: float, chance: float) -> bool:
    if found.score <= current.score:
        return True
    if found.score[0] > current.score[0] or warmth <= 0:
        return False
    return chance < math.exp((current.step_s - found.step_s) / warmth)


class _Moves:
    def __init__(self, problem: Problem, draws: random.Random, movable: list[int]) -> None:
        self._problem, self._draws, self._movable = problem, draws, movable
        self._near = _neighbours(problem)
        self._chains = _chains(problem)

    def draw(self, assignment: Assignment) -> Assignment:
        """Return another assignment that satisfies the constraints, except limits of memory."""
        devices = [assignment[block[0]] for block in self._problem.together]
        kind = self._draws.random()
        block = self._on_the_way(assignment) if kind < 0.15 else self._draws.choice(self._movable)
        if 0.15 <= kind < 0.25:
            self._swap(devices, [block], [self._draws.choice(self._movable)])
        elif kind < 0.40:
            self._swap(devices, self._chains[block], self._chains[self._draws.choice(self._movable)])
        elif kind < 0.55:
            self._move([block], devices, self._other(devices, block))
        elif kind < 0.65:
            # To the device of a neighbour, which saves a transfer.
            near = [devices[other] for other in self._near[block] if devices[other] in self._problem.choices[block]]
            self._move([block], devices, self._draws.choice(near) if near else self._other(devices, block))
        elif kind < 0.80:
            self._move(self._chains[block], devices, self._other(devices, block))
        else:
            self._move(self._group(devices, block), devices, self._other(devices, block))
        return self._problem.spread(devices)

    def _other(self, devices: list[int], block: int) -> int:
        return self._draws.choice([device for device in self._problem.choices[block] if device != devices[block]])

    def _move(self, blocks: Sequence[int], devices: list[int], target: int) -> None:
        for block in blocks:
            if target in self._problem.choices[block]:
                devices[block] = target

    def _swap(self, devices: list[int], these: Sequence[int], those: Sequence[int]) -> None:
        """Swap the devices of two chains; if they are on one device, move the first away."""
        here, there = devices[these[0]], devices[those[0]]
        if here == there:
            there = self._other(devices, these[0])
        else:
            self._move(those, devices, here)
        self._move(these, devices, there)

    def _group(self, devices: list[int], block: int) -> list[int]:
        """Return `block` and a random number of connected blocks on its device."""
        wanted, found, edge = self._draws.randint(2, LARGEST_GROUP), [block], [block]
        while edge and len(found) < wanted:
            at = edge.pop(self._draws.randrange(len(edge)))
            new = [other for other in self._near[at] if devices[other] == devices[block] and other not in found]
            self._draws.shuffle(new)
            new = new[: wanted - len(found)]
            found += new
            edge += new
        return found

    def _on_the_way(self, assignment: Assignment) -> int:
        """Return a random block on the critical path, which leads back from the unit that ends last."""
        problem, path = self._problem, []
        found = simulate(problem, assignment, with_memory=False)
        before: int | None = max(range(len(found.end_s)), key=lambda number: found.end_s[number])
        while before is not None:
            path.append(problem.block_of[before])
            before = _held_up_by(problem, assignment, found, before)
        movable = set(self._movable)
        return self._draws.choice([block for block in path if block in movable] or self._movable)


def _held_up_by(problem: Problem, assignment: Assignment, found: Prediction, number: int) -> int | None:
    """Return the unit that ended last among a unit's dependencies and the earlier units on its device."""
    earlier = [other for other in problem.predecessors[number] if found.end_s[other] <= found.start_s[number]]
    earlier += [
        other
        for other in range(len(problem.units))
        if assignment[other] == assignment[number]
        and found.end_s[other] <= found.start_s[number]
        and found.start_s[other] < found.start_s[number]
    ]
    earlier = [other for other in earlier if found.start_s[other] < found.start_s[number]]
    return max(earlier, key=lambda other: (found.end_s[other], other), default=None)


def _neighbours(problem: Problem) -> list[list[int]]:
    """Return, for each block, the blocks on which it depends or which depend on it."""
    found: list[dict[int, None]] = [{} for _ in problem.together]
    for number, needed in enumerate(problem.predecessors):
        for earlier in needed:
            one, other = problem.block_of[number], problem.block_of[earlier]
            if one != other:
                found[one][other] = found[other][one] = None
    return [list(near) for near in found]


def _chains(problem: Problem) -> list[list[int]]:
    """Return, for each block, its chain: the blocks before and after it without a fork or a join between."""
    chains = [[block] for block in range(len(problem.together))]
    for number, needed in enumerate(problem.predecessors):
        if len(needed) == 1 and len(problem.successors[needed[0]]) == 1:
            earlier, later = problem.block_of[needed[0]], problem.block_of[number]
            one, other = chains[earlier], chains[later]
            # Blocks bound to a device are not in a chain that moves.
            if one is not other and min(len(problem.choices[earlier]), len(problem.choices[later])) > 1:
                one += other
                for block in other:
                    chains[block] = one
    return chains
