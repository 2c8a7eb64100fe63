"""Restarts of tasks that have ended: a pure state machine without a clock.

Invariants:
- a task that finished with status 0 is never restarted;
- the pause before a restart of a task doubles each time, up to `LONGEST_PAUSE_S`;
- a task that ran for `STEADY_S` before it failed has all its restarts again: the limit is for tasks that fail
  repeatedly, not for long runs on machines that fail now and then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 300.0
USUAL_LIMIT = 3


@dataclass(frozen=True)
class RestartPolicy:
    """A task that fails is restarted up to `limit` times in a row; 0 for never."""

    limit: int = 0

    @staticmethod
    def parse(text: str) -> RestartPolicy:
        """Parse `never`, `on-failure` or `on-failure:N`; raises ValueError for any other text."""
        found = re.fullmatch(r"never|on-failure(?::([0-9]+))?", text)
        if found is None:
            raise ValueError(
                f"{text!r} is no restart policy; give never, on-failure or on-failure:5, or another number"
            )
        if text == "never":
            return RestartPolicy(0)
        return RestartPolicy(USUAL_LIMIT if found[1] is None else int(found[1]))


NEVER = RestartPolicy()


class Restarts:
    """The restarts of all tasks, by the policies of their jobs; tasks of a job without a policy are never restarted."""

    def __init__(self, policies: Mapping[str, RestartPolicy]) -> None:
        self._policies = policies
        self._in_a_row: Counter[str] = Counter()
        self._in_all: Counter[str] = Counter()

    def pause_s(self, task: str, job: str, status: int, ran_s: float) -> float | None:
        """Count a task's end with `status` after `ran_s`; return the pause before its restart, None for no restart."""
        if ran_s >= STEADY_S:
            self._in_a_row[task] = 0
        if status == 0 or self._in_a_row[task] >= self._policies.get(job, NEVER).limit:
            return None
        self._in_a_row[task] += 1
        self._in_all[task] += 1
        return float(min(FIRST_PAUSE_S * 2 ** (self._in_a_row[task] - 1), LONGEST_PAUSE_S))

    def count(self, task: str) -> int:
        """Return the number of times that the task was restarted."""
        return self._in_all[task]

    def standing(self, task: str, job: str) -> str:
        """Return the number of the last restart and the limit, such as "1 of 3"."""
        return f"{self._in_a_row[task]} of {self._policies.get(job, NEVER).limit}"
