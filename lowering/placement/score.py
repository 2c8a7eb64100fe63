"""What makes one assignment better than another: first that memory suffices, then the predicted time of a step."""

from __future__ import annotations

from typing import NamedTuple

from dflow.lowering.placement.problem import Assignment, Problem
from dflow.lowering.placement.simulate import simulate


class Scored(NamedTuple):
    """An assignment with the bytes that it lacks, and its time in s; less is better."""

    score: tuple[int, float]
    assignment: Assignment

    @property
    def step_s(self) -> float:
        """The predicted time of a step."""
        return self.score[1]


def scored(problem: Problem, assignment: Assignment) -> Scored:
    """Simulate the assignment."""
    found = simulate(problem, assignment, with_memory=problem.is_limited)
    return Scored((found.overflow(problem.machine.limits), found.step_s), assignment)
