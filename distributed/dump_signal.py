"""SIGUSR2 has a process write its last events down, as a person asks who sees that it is stuck.

The signal is taken only from a process that has no handler of its own for it, and only in its main thread, where
Python runs handlers. A main thread that is inside XLA runs none until it returns; `dflow dump` reaches such a task.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

WHY = "SIGUSR2"


def dump_on_signal(dump: Callable[[str], None]) -> None:
    """Call `dump` with the reason at each SIGUSR2; it must not wait."""
    is_free = signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, *_ours)
    if not is_free or threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: FrameType | None) -> None:
        dump(WHY)

    _ours[:] = [handle]
    signal.signal(signal.SIGUSR2, handle)


#: The handler that was installed here last.
_ours: list[Callable[[int, FrameType | None], None]] = []
