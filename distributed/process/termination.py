"""SIGTERM during a training loop, as the owner of a preemptible machine sends it before taking the machine away.

Why: other workers repeat the newest steps of a process that ends immediately. A loop that ends between two steps
reports the steps that are done, and the worker leaves the cluster.

Invariants: SIGTERM raises `Terminated` in the main thread, never within a step; a second SIGTERM does not wait for the
end of the step. A handler that the program has installed is kept. A loop that holds SIGTERM back for all of its steps
looks at `TerminationGuard.has_come` itself; a signal that it has not looked at ends the program when the loop is left.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar, NoReturn

#: Exit status of a program that SIGTERM ended, by the convention of shells.
STATUS = 128 + signal.SIGTERM
#: Reason for leaving the cluster.
REASON = "it was ended by SIGTERM"


class Terminated(SystemExit):
    """SIGTERM has come to a training loop; ends the program with the status `STATUS`.

    reason     for leaving the cluster
    is_agreed  whether all processes that compute together raise it after the same step
    """

    #: The newest one of this process.
    raised: ClassVar[Terminated | None] = None

    def __init__(self, reason: str = REASON, *, is_agreed: bool = False) -> None:
        super().__init__(STATUS)
        self.reason, self.is_agreed = reason, is_agreed
        Terminated.raised = self


class TerminationGuard:
    """The handler of SIGTERM of one training loop: it delays the signal until the present step has ended."""

    def __init__(self) -> None:
        self._in_step = self._has_raised = False
        #: Whether the signal has come.
        self.has_come = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return the context of a step and its record by the loop, after which SIGTERM raises `Terminated`."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before
        if self.has_come and not self._in_step:
            self._raise()

    def came(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        is_again, self.has_come = self.has_come, True
        if is_again or not self._in_step:
            self._raise()

    def left(self) -> None:
        """End the loop: send this process SIGTERM again if it came during the last step and raised nothing yet."""
        if self.has_come and not self._has_raised:
            signal.raise_signal(signal.SIGTERM)

    def _raise(self) -> NoReturn:
        self._has_raised = True
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
    is_left = False
    try:
        yield guard
    except GeneratorExit:
        is_left = True
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if is_left:
            guard.left()
