"""The score of an assignment: first the memory that it lacks, then the predicted time of a step."""

from __future__ import annotations

from typing import NamedTuple

from dflow.lowering.placement.calls import as_calls
from dflow.lowering.placement.problem import Assignment, Problem
from dflow.lowering.placement.simulate import Prediction, simulate


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
    found = predicted(problem, assignment, with_memory=problem.is_limited)
    return Scored((found.overflow(problem.machine.limits), found.step_s), assignment)
