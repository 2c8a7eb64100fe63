"""Waiting for what another thread brings about, where nothing says that it has."""

from __future__ import annotations

import threading
from collections.abc import Callable

DEADLINE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; raises AssertionError after the tests' deadline."""
    ended = threading.Event()
    for _ in range(int(DEADLINE_S / 0.005)):
        if condition():
            return
        ended.wait(0.005)
    raise AssertionError("the condition did not come about")
