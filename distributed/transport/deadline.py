"""Deadlines of the transport's waits."""

from __future__ import annotations

import time
from typing import NamedTuple


class Deadline(NamedTuple):
    """The time of the monotonic clock at which a time-out ends, and that time-out, in seconds."""

    at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Return the deadline `timeout_s` from now."""
        return cls(time.monotonic() + timeout_s, timeout_s)

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.at

    @property
    def left_s(self) -> float:
        """The time left, at least 1 ms."""
        return max(self.at - time.monotonic(), 0.001)
