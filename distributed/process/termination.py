"""SIGTERM during a training loop, as the owner of a preemptible machine sends it before taking the machine away.

Why: other workers repeat the newest steps of a process that ends immediately. A loop that ends between two steps
reports the steps that are done, and the worker leaves the cluster.

Invariants: SIGTERM raises `Terminated` in the main thread, never within a step; a second SIGTERM does not wait for the
end of the step. A handler that the program has installed is kept.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

#: Exit status of a program that SIGTERM ended, by the convention of shells.
STATUS = 128 + signal.SIGTERM
#: Reason for leaving the cluster.
REASON = "it was ended by SIGTERM"


class Terminated(SystemExit):
    """SIGTERM has come to a training loop; ends the program with the status `STATUS`."""

    #: Whether one was raised in this process.
    was_raised: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__(STATUS)
        Terminated.was_raised = True


class TerminationGuard:
    """Holds SIGTERM back while a step runs."""

    def __init__(self) -> None:
        self._in_step = self._has_come = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return the context of a step and its record by the loop, after which SIGTERM raises `Terminated`."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before
        if self._has_come and not self._in_step:
            raise Terminated

    def came(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        is_again, self._has_come = self._has_come, True
        if is_again or not self._in_step:
            raise Terminated


@contextmanager
def held_back_in_steps() -> Iterator[TerminationGuard]:
    """Return the context of a training loop. SIGTERM then ends the program between two steps.

    Does nothing on another thread than the main one, and where the program handles SIGTERM.
    """
    present = signal.getsignal(signal.SIGTERM)
    outer = getattr(present, "__self__", None)
    guard = outer if isinstance(outer, TerminationGuard) else TerminationGuard()
    if threading.current_thread() is not threading.main_thread() or present is not signal.SIG_DFL:
        yield guard
        return
    signal.signal(signal.SIGTERM, guard.came)
    try:
        yield guard
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
