"""Exhaustive search: the optimum of small problems."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from dflow.lowering.placement.problem import Assignment, Problem
from dflow.lowering.placement.score import Scored, scored


def size(problem: Problem) -> int:
    """Return the number of assignments that satisfy the constraints, except limits of memory."""
    return prod(len(choices) for choices in problem.choices)


def every(problem: Problem) -> Iterator[Assignment]:
    """Yield the assignments that satisfy the constraints, except limits of memory."""
    for devices in product(*problem.choices):
        yield problem.spread(devices)


def exhaustive(problem: Problem) -> Scored:
    """Return the best of all assignments; of equal ones the first."""
    return min((scored(problem, assignment) for assignment in every(problem)), key=lambda found: found.score)
