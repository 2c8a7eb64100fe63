"""An array as memory of its chunk files: read from the disk as it is used, and shared with other processes that map it.

The chunks of a zarr array are files, each with a checksum after its data. If the data of each is whole pages, their
mappings are put one after another, and the array is one piece of memory. The mapping is private: a write to it, as by a
program that owns the array, changes this process's copy of a page, and never the file.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: Least size in bytes of an array whose files are mapped: a smaller one is read, and its checksums compared.
LEAST_BYTES = 4 << 20
#: A multiple of the size of a page on every machine.
_PAGES_BYTES = 64 << 10
#: Of `mmap` in the C library of Linux; Python's `mmap` maps at no address of the caller's.
_MAP_FIXED = 0x10


def rows_of_whole_pages(rows: int, row_bytes: int, whole_bytes: int) -> int:
    """Return a number of rows for a chunk of an array: `rows`, or of a large array up to a page of rows more.

    `rows` is kept if it is less than a page of rows.
    """
    step = _PAGES_BYTES // math.gcd(_PAGES_BYTES, row_bytes)
    return rows if whole_bytes < LEAST_BYTES or rows < step else -(-rows // step) * step


def can_map(shape: Sequence[int], dtype: np.dtype[Any], chunk: Sequence[int]) -> bool:
    """Whether an array in chunks of this shape can be one piece of memory here."""
    chunk_bytes = math.prod(chunk) * dtype.itemsize
    return (
        sys.platform == "linux"
        and sys.byteorder == "little"
        and math.prod(shape) * dtype.itemsize >= LEAST_BYTES
        and [*chunk[1:]] == [*shape[1:]]
        and (chunk[0] == shape[0] or chunk_bytes % mmap.PAGESIZE == 0)
    )


def mapped_chunks(files: Sequence[Path], chunk_bytes: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of chunks. The last chunk may be longer than its part of the array. Raises OSError."""
    # Without the right to write, the system sets no memory aside for the whole.
    region = mmap.mmap(-1, len(files) * chunk_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    memory = np.frombuffer(region, np.uint8)
    start = memory.ctypes.data
    for number, path in enumerate(files):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            _map_at(start + number * chunk_bytes, chunk_bytes, file)
        finally:
            os.close(file)
    return memory[:size_bytes]


def _map_at(address: int, size_bytes: int, file: int) -> None:
    """Map the start of a file in place of memory at an address, of this module's `mmap`, which unmaps both."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if library.mmap(address, size_bytes, access, flags, file, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
