"""Wait in a test for an effect of another thread that no event announces."""

from __future__ import annotations

import threading
from collections.abc import Callable

DEADLINE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. Raises AssertionError after the tests' deadline."""
    ended = threading.Event()
    for _ in range(int(DEADLINE_S / 0.005)):
        if condition():
            return
        ended.wait(0.005)
    raise AssertionError("the condition did not come about")
