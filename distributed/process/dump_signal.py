"""SIGUSR2 makes a process dump its newest events, to find out why it is stuck.

The handler is installed only in a process that has no other handler for this signal, and only from its main thread,
where Python runs handlers. A main thread inside XLA runs none until it returns; `dflow dump` reaches such a task.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType


def dump_on_signal(dump: Callable[[str], None]) -> None:
    """Have each SIGUSR2 call `dump` with the reason, on the main thread; it must not block.

    Does nothing on another thread than the main one, or where the program handles SIGUSR2. A later call replaces
    `dump`.
    """
    earlier = signal.getsignal(signal.SIGUSR2)
    is_free = earlier == signal.SIG_DFL or getattr(earlier, "func", None) is _handle
    if is_free and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, partial(_handle, dump))


def _handle(dump: Callable[[str], None], number: int, frame: FrameType | None) -> None:
    dump("SIGUSR2")
