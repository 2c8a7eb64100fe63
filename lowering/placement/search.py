"""Local search: from an assignment to better ones by moving single units and connected groups.

Each turn moves some of the units to another device and keeps the result when it is no worse, or, early on, when it is
little worse (simulated annealing). The moves are drawn from a seed, so the same seed and number of turns give the same
result; a budget in seconds only ends it sooner.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from dflow.lowering.placement.problem import Assignment, Problem
from dflow.lowering.placement.score import Scored, scored
from dflow.lowering.placement.simulate import simulate

#: How much worse a result may be at first, as part of the time of a step, to be kept with a chance of 1/e.
WARMTH = 0.03
#: How many of `together` one move takes along at most.
LARGEST_GROUP = 12


def search(
    problem: Problem,
    start: Assignment,
    *,
    turns: int,
    seed: int = 0,
    is_over: Callable[[], bool] = lambda: False,
) -> Scored:
    """The best assignment found in `turns` turns, never worse than `start`. `is_over` is asked before each turn."""
    movable = [block for block, choices in enumerate(problem.choices) if len(choices) > 1]
    best = current = scored(problem, start)
    if not movable:
        return best
    moves = _Moves(problem, random.Random(seed), movable)
    chance = random.Random(seed + 1)
    for turn in range(turns):
        if is_over():
            break
        found = scored(problem, moves.draw(current.assignment))
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

    def draw(self, assignment: Assignment) -> Assignment:
        """Another assignment that keeps the constraints, memory aside."""
        devices = [assignment[block[0]] for block in self._problem.together]
        kind = self._draws.random()
        block = self._on_the_way(assignment) if kind < 0.15 else self._draws.choice(self._movable)
        if 0.15 <= kind < 0.30:
            self._swap(devices, block)
        elif kind < 0.60:
            self._move([block], devices, self._other(devices, block))
        elif kind < 0.75:
            # To where a neighbour is: what talks together comes together.
            near = [devices[other] for other in self._near[block] if devices[other] in self._problem.choices[block]]
            self._move([block], devices, self._draws.choice(near) if near else self._other(devices, block))
        else:
            self._move(self._group(devices, block), devices, self._other(devices, block))
        return self._problem.spread(devices)

    def _other(self, devices: list[int], block: int) -> int:
        return self._draws.choice([device for device in self._problem.choices[block] if device != devices[block]])

    def _move(self, blocks: list[int], devices: list[int], target: int) -> None:
        for block in blocks:
            if target in self._problem.choices[block]:
                devices[block] = target

    def _swap(self, devices: list[int], block: int) -> None:
        others = [
            other
            for other in self._movable
            if devices[other] != devices[block]
            and devices[other] in self._problem.choices[block]
            and devices[block] in self._problem.choices[other]
        ]
        if others:
            other = self._draws.choice(others)
            devices[block], devices[other] = devices[other], devices[block]
        else:
            devices[block] = self._other(devices, block)

    def _group(self, devices: list[int], block: int) -> list[int]:
        """Connected blocks on one device, from `block` on."""
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
        """A block on the critical path: what ends last, or what this waited for, and so on."""
        problem = self._problem
        found = simulate(problem, assignment, with_memory=False)
        at, path = max(range(len(found.end_s)), key=lambda number: found.end_s[number]), []
        before = sorted(range(len(found.end_s)), key=lambda number: found.end_s[number])
        while True:
            path.append(problem.block_of[at])
            needed = problem.predecessors[at]
            same = [
                n for n in before if assignment[n] == assignment[at] and found.end_s[n] <= found.start_s[at] and n != at
            ]
            candidates = [*needed, *same[-1:]]
            earlier = [n for n in candidates if found.end_s[n] < found.end_s[at]]
            if not earlier:
                break
            at = max(earlier, key=lambda number: found.end_s[number])
        movable = set(self._movable)
        choices = [block for block in path if block in movable]
        return self._draws.choice(choices or self._movable)


def _neighbours(problem: Problem) -> list[list[int]]:
    """By block, the others that give it something or take something from it."""
    found: list[dict[int, None]] = [{} for _ in problem.together]
    for number, needed in enumerate(problem.predecessors):
        for earlier in needed:
            one, other = problem.block_of[number], problem.block_of[earlier]
            if one != other:
                found[one][other] = found[other][one] = None
    return [list(near) for near in found]
