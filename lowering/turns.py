"""Who may look at what a store holds: one at a time, for moments, and not a handler of a signal in the midst of it.

Invariant: the lock is held for moments, in which nothing of the user's is run, and never while waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from dflow.tracing.errors import VariableError
from dflow.tracing.source import at, caller

Found = TypeVar("Found")

#: After how long someone who waits looks again, in s: an interrupt may come before a step has told those who wait.
LOOK_S = 1.0

#: How long to wait for a variable while a step is dispatched that has it, in s.
STEP_S = 600.0


class Turns:
    """The turns at one store."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: Whether someone has the lock who is not to be disturbed, by a handler of a signal on the same thread.
        self.is_inside = False
        #: Tells those who wait that a step was dispatched, and steps that nobody waits any more.
        self.changed = threading.Condition(self.lock)

    def alone(self, do: Callable[[], Found]) -> Found:
        """Do what nobody else is to see half done. Raises VariableError within the same on this thread."""
        with self.lock:
            if self.is_inside:
                raise VariableError(
                    f"a handler of a signal uses variables while the thread it came to is about to use some"
                    f"{at(caller())}\n  have the handler set a flag, and look at the flag between steps"
                )
            self.is_inside = True
            try:
                found = do()
            finally:
                self.is_inside = False
            return found

    def pause(self, condition: threading.Condition, seconds: float) -> None:
        """Wait for a condition of this lock, in `alone`, while others have it."""
        self.is_inside = False
        try:
            condition.wait(seconds)
        finally:
            self.is_inside = True
