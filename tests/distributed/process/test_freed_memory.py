"""A process retains the memory that it has freed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from dflow.distributed.process.freed_memory import LARGEST_BYTES, keep_freed_memory
keep_freed_memory(has_threads={has_threads})
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def fill():
    blocks = [libc.malloc(LARGEST_BYTES // 2) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, LARGEST_BYTES // 2)
    for block in blocks:
        libc.free(block)
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
@pytest.mark.parametrize(
    ("has_threads", "has_settings"),
    [(False, False), (True, False), (False, True)],
    ids=["of a task", "of a worker", "with the user's settings"],
)
def test_memory_that_was_freed_is_used_again_without_page_faults(has_threads: bool, has_settings: bool) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    # With this setting, which must stay in effect, glibc returns blocks of this size.
    environment = kept | ({"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if has_settings else {})
    words = [sys.executable, "-c", FAULTS.replace("{has_threads}", str(has_threads))]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    pages = 5 * 4 * (16 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert (int(ran.stdout) > pages / 2) is has_settings
