"""Counts of steps by outcome, and their durations, since the start of a task.

Invariants: counts never shrink. Errors are counted by dflow class, all other classes as one, so that their number is
bounded.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

from dflow.tracing import errors

#: Upper bounds of the buckets of durations, in s: from the fastest distributed step to longer than users wait.
BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
OTHER_ERROR = "other"
#: Weight of the newest step in the running mean of the duration.
NEWEST_PART = 0.1


@dataclass(frozen=True)
class StepTotals:
    """The counts at one moment.

    `buckets`  number of successful steps by bucket: bucket i has durations up to `BOUNDS_S[i]`, the last all above
    `total_s`  their total duration, in s
    `mean_s`   running mean of their duration, weighted to the newest; 0 while none has ended
    `errors`   number of failed steps by error class
    """

    buckets: tuple[int, ...]
    total_s: float
    mean_s: float
    errors: dict[str, int]

    @property
    def done(self) -> int:
        """Number of successful steps."""
        return sum(self.buckets)

    @property
    def ended(self) -> int:
        """Number of steps, with or without an error."""
        return self.done + sum(self.errors.values())


class StepCounts:
    """Counts steps; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0
        self._mean_s = 0.0
        self._errors: dict[str, int] = {}

    def ended(self, took_s: float, outcome: object) -> None:
        """Count a step that took `took_s`; it failed if `outcome` is an exception."""
        with self._lock:
            if isinstance(outcome, BaseException):
                name = error_class(outcome)
                self._errors[name] = self._errors.get(name, 0) + 1
                return
            self._buckets[bisect_left(BOUNDS_S, took_s)] += 1
            self._total_s += took_s
            self._mean_s += (took_s - self._mean_s) * (NEWEST_PART if self._mean_s else 1.0)

    def totals(self) -> StepTotals:
        """Return the counts."""
        with self._lock:
            return StepTotals(tuple(self._buckets), self._total_s, self._mean_s, dict(self._errors))


def error_class(error: BaseException) -> str:
    """Name of the error's class, or of its nearest base class in dflow; `OTHER_ERROR` if there is none."""
    for kind in type(error).__mro__:
        if kind is not errors.DflowError and getattr(errors, kind.__name__, None) is kind:
            return str(kind.__name__)
    return OTHER_ERROR
