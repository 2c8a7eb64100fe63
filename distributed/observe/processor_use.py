"""Use of the processor by this process, read from the kernel's counts: it costs nothing until it is read.

The division into time outside of the kernel and in it is not read: many kernels only sample it, 100 to 1,000 times a
second. The total time of each thread is exact.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Collection, Iterable


def processor_time() -> tuple[float, int]:
    """Return the processor time of all threads, in s, and the number of wake-ups; takes about 2 us."""
    # A thread that gives up its core to wait makes a voluntary context switch.
    return time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def processor_use() -> tuple[float, float, int]:
    """Return the processor time of Python's threads and of others, in s since the start, and the number of wake-ups.

    It takes about 1 us for each thread of the process.
    """
    total_s, wakeups = processor_time()
    own = {thread.native_id for thread in threading.enumerate() if thread.native_id is not None}
    other_s = time_of_others(map(int, os.listdir("/proc/self/task")), own, thread_time)
    return total_s - other_s, other_s, wakeups


def time_of_others(threads: Iterable[int], own: Collection[int], time_of: Callable[[int], float]) -> float:
    """Return the sum of `time_of(thread)` over the `threads` that are not in `own` and have not ended."""
    total_s = 0.0
    for thread in threads:
        if thread not in own:
            with contextlib.suppress(OSError):
                total_s += time_of(thread)
    return total_s


def thread_time(thread: int) -> float:
    """Return the processor time of a thread of this process, by its native id, in s; raises OSError if it has ended."""
    # Linux's number of that clock, as glibc's pthread_getcpuclockid computes it: 4 is "of a thread", 2 is "exact".
    return time.clock_gettime(~thread << 3 | 4 | 2)
