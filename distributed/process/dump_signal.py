"""SIGUSR2 makes a process dump its newest events, to find out why it is stuck.

The handler is installed only in a process that has no other handler for this signal, and only from its main thread,
where Python runs handlers. A main thread inside XLA runs none until it returns; `dflow dump` reaches such a task.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

WHY = "SIGUSR2"


def dump_on_signal(dump: Callable[[str], None]) -> None:
    """Call `dump` with the reason at each SIGUSR2; it must not block."""
    is_free = signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, *_ours)
    if not is_free or threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: FrameType | None) -> None:
        dump(WHY)

    _ours[:] = [handle]
    signal.signal(signal.SIGUSR2, handle)


#: The handler that this file installed last.
_ours: list[Callable[[int, FrameType | None], None]] = []
