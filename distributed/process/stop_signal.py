"""Waiting until a process must stop: by SIGTERM, by SIGINT, or by its own fault.

Invariant: after construction neither signal interrupts the process at an arbitrary point, except in `ending`; `wait`
reads both when the process is ready for them, whichever thread received them.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar, NoReturn

_BY_ITSELF = 0


class Stopped(SystemExit):
    """A signal has ended the process in its wait for others."""

    #: Whether one was raised in this process, whose connections then end for that reason, wherever it came.
    was_raised: ClassVar[bool] = False

    def __init__(self, status: int) -> None:
        super().__init__(status)
        Stopped.was_raised = True


class StopSignal:
    """Takes over SIGTERM and SIGINT for the rest of the process; construct it in the main thread."""

    def __init__(self) -> None:
        self._fault, self._is_ending, self._sigterm_status = "", False, 0
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._came)

    @contextmanager
    def ending(self, undo: Callable[[], None], status: int = 0) -> Iterator[None]:
        """Return the context of a wait for other processes, which SIGTERM and SIGINT end by `Stopped`.

        So does a signal that came before. A further one does not disturb the end.

        undo    ends what was begun, if its object has not reached the caller when the signal comes
        status  exit status for SIGTERM; for SIGINT and a fault it is that of `wait_for_exit_status`
        """
        try:
            self._is_ending, self._sigterm_status = True, status
            if (which := self.wait(0)) is not None:
                self._end(which)
            yield
            self._is_ending = False
        except Stopped:
            undo()
            raise
        finally:
            self._is_ending = False

    def stop(self, fault: str) -> None:
        """Make `wait` return because of a fault; thread-safe."""
        self._fault = self._fault or fault
        os.write(self._write_end, bytes([_BY_ITSELF]))

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for a signal and return its number, 0 for a fault of this process, or None after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready, _, _ = select.select([self._read_end], [], [], left_s)
            which = os.read(self._read_end, 1)[0] if ready else None
            # Python writes the number of every signal with a handler; skip those of other handlers.
            if which in (None, _BY_ITSELF, signal.SIGTERM, signal.SIGINT):
                return which

    def wait_for_exit_status(self) -> tuple[int, str]:
        """Wait without a timeout; return the exit status (0 for SIGTERM), and the fault or an empty text."""
        which = self.wait()
        if which == _BY_ITSELF:
            return 1, self._fault
        return (0 if which == signal.SIGTERM else 130), ""

    def _came(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Outside of `ending` do nothing: Python has written the number to the pipe."""
        if self._is_ending:
            self._end(number)

    def _end(self, which: int) -> NoReturn:
        self._is_ending = False
        raise Stopped({_BY_ITSELF: 1, signal.SIGTERM: self._sigterm_status}.get(which, 130))
