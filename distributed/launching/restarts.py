"""Restarts of tasks that have ended: a pure state machine without a clock.

Invariants:
- a task that finished with status 0 is never restarted;
- the first restart of a task is immediate, since steps may wait for it; the pause before the second is `FIRST_PAUSE_S`,
  and doubles each time, up to `LONGEST_PAUSE_S`;
- a task that ran for `STEADY_S` before it failed has all its restarts again: the limit is for tasks that fail
  repeatedly, not for long runs on machines that fail now and then.
"""

from __future__ import annotations

import re

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 300.0
USUAL_LIMIT = 3


def restart_limit(text: str) -> int:
    """Parse `never`, `on-failure` or `on-failure:N` to the number of restarts in a row; raises ValueError otherwise."""
    found = re.fullmatch(r"never|on-failure(?::([0-9]+))?", text)
    if found is None:
        raise ValueError(f"{text!r} is no restart policy; give never, on-failure or on-failure:5, or another number")
    if text == "never":
        return 0
    return USUAL_LIMIT if found[1] is None else int(found[1])


class Restarts:
    """The restarts of one task that has failed: up to `limit` of them `in_a_row`, and a `count` of all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = self.count = 0

    def pause_s(self, status: int, ran_s: float) -> float | None:
        """Count an end with `status` after `ran_s`; return the pause before the restart in s, None for no restart."""
        if ran_s >= STEADY_S:
            self.in_a_row = 0
        if status == 0 or self.in_a_row >= self.limit:
            return None
        self.in_a_row += 1
        self.count += 1
        return float(min(FIRST_PAUSE_S * 2 ** (self.in_a_row - 2), LONGEST_PAUSE_S)) if self.in_a_row > 1 else 0.0
