"""Waiting until a process must stop: by SIGTERM, by SIGINT, or by its own fault.

Invariant: after construction neither signal interrupts the process at an arbitrary point; `wait` reads both when the
process is ready for them, whichever thread received them.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Made = TypeVar("Made")
#: Bytes in the pipe that are no numbers of signals: one for a fault, one for the end of `until_done`.
_BY_ITSELF, _DONE = 0, 255


class StopSignal:
    """Takes over SIGTERM and SIGINT for the rest of the process; construct it in the main thread."""

    def __init__(self) -> None:
        self._fault = ""
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave_it_to_the_pipe)

    def stop(self, fault: str) -> None:
        """Make `wait` return because of a fault; thread-safe."""
        self._fault = self._fault or fault
        os.write(self._write_end, bytes([_BY_ITSELF]))

    def until_done(self, do: Callable[[], Made], undo: Callable[[], object], status: int = 0) -> Made:
        """Return `do()`, which waits for others and is called on another thread; raise its error.

        A signal that comes before or meanwhile calls `undo` and raises SystemExit, with `status` for SIGTERM and else
        that of `wait_for_exit_status`. `undo` ends what `do` has begun; `do` may go on until the process ends.
        """
        made: list[Made] = []
        failed: list[BaseException] = []

        def call() -> None:
            try:
                made.append(do())
            except BaseException as error:
                failed.append(error)
            os.write(self._write_end, bytes([_DONE]))

        threading.Thread(target=call, name="dflow start", daemon=True).start()
        which = self._wait(None, (_DONE, _BY_ITSELF, signal.SIGTERM, signal.SIGINT))
        if which != _DONE:
            undo()
            raise SystemExit({_BY_ITSELF: 1, signal.SIGTERM: status}.get(which or 0, 130))
        if failed:
            raise failed[0]
        return made[0]

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for a signal and return its number, 0 for a fault of this process, or None after `timeout_s`."""
        return self._wait(timeout_s, (_BY_ITSELF, signal.SIGTERM, signal.SIGINT))

    def _wait(self, timeout_s: float | None, awaited: tuple[int, ...]) -> int | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready, _, _ = select.select([self._read_end], [], [], left_s)
            which = os.read(self._read_end, 1)[0] if ready else None
            # Python writes the number of every signal with a handler; skip those of other handlers.
            if which is None or which in awaited:
                return which

    def wait_for_exit_status(self) -> tuple[int, str]:
        """Wait without a timeout; return the exit status (0 for SIGTERM), and the fault or an empty text."""
        which = self.wait()
        if which == _BY_ITSELF:
            return 1, self._fault
        return (0 if which == signal.SIGTERM else 130), ""


def _leave_it_to_the_pipe(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the number to the pipe."""
