"""The lock of a store, and its critical sections.

Invariant: the lock is held briefly, never while waiting or while user code runs. A signal handler on the thread that
is in a critical section must not enter another one: it gets an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from dflow.tracing.errors import VariableError

Found = TypeVar("Found")

#: A waiting thread checks again after at most this time, in s: an interrupt may keep a step from notifying it.
LOOK_S = 1.0

#: Longest wait for a variable while the step that holds its value is being dispatched, in s.
STEP_S = 600.0


class StoreLock:
    """The lock of one store, with its critical sections (`alone`)."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: Whether a thread is in a critical section. The lock alone would admit a signal handler on that thread.
        self.is_inside = False
        #: Notified when a step was dispatched, for waiting threads, and when a wait has ended, for steps that yield.
        self.changed = threading.Condition(self.lock)

    def alone(self, do: Callable[[], Found]) -> Found:
        """Return `do()`, run as a critical section. Raises VariableError inside another one of this thread."""
        with self.lock:
            if self.is_inside:
                raise VariableError(
                    "a handler of a signal uses variables while the thread it came to is about to use some",
                    "have the handler set a flag, and look at the flag between steps",
                )
            self.is_inside = True
            try:
                found = do()
            finally:
                self.is_inside = False
            return found

    def pause(self, condition: threading.Condition, seconds: float) -> None:
        """Wait for a condition of this lock, from within `alone`. Other threads may enter meanwhile."""
        self.is_inside = False
        try:
            condition.wait(seconds)
        finally:
            self.is_inside = True
