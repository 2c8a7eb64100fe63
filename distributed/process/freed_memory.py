"""Memory that a process has freed, and retains for its next step instead of returning it to the system.

Why: XLA allocates the results of each program by `malloc`. glibc returns large blocks to the system when they are
freed, and the system clears each page of the blocks allocated next. In synchronous steps of 100 MB with Adam this took
up to half of the processor time of each of two parameter tasks, depending on which thread had allocated a block.
"""

from __future__ import annotations

import ctypes
import os

#: Parameters of `mallopt`, from glibc's `malloc.h`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: The end of the heap is returned to the system when more than this many bytes of it are free. Free memory between
#: blocks in use is retained without a limit, as always.
TRIMMED_FROM_BYTES = 1 << 30
#: The largest limit that glibc accepts. Blocks of more bytes are returned to the system when they are freed.
LARGEST_BYTES = 32 << 20


def keep_freed_memory(*, has_threads: bool) -> None:
    """Have this process retain freed blocks of up to `LARGEST_BYTES`, instead of returning them to the system.

    Does nothing if the environment has settings of `malloc`, or the C library is not glibc.

    has_threads  whether the process already has threads that allocate; if not, it is also limited to two arenas
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(_TRIM_THRESHOLD, TRIMMED_FROM_BYTES)
    if mallopt is not None and not has_threads:
        # All arenas but the first return their memory whenever one of their parts of 64 MiB is free. With the first one
        # alone, threads wait for each other in steps of many small variables.
        mallopt(_ARENA_MAX, 2)
