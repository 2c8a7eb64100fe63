"""Arrays whose pages lie in a file, and in memory as far as a limit allows.

Why: a table may be larger than the memory of its tasks, while few of its rows are in use. XLA computes with an array at
its address, so this replaces the pages at that address by those of a file, as `mmap` does: programs run as before, and
write in place. Linux reads a page from the disk when it is touched. A thread of the process has pages written to the
disk and freed when the arrays have more pages in memory than their limit.

The file has no name, so it ends with the process. Its space is reserved before, so that no write of a page fails.

Invariants:
- The pages of an address belong to the array's memory, which XLA frees when the last array that has it is gone. So
  nothing here depends on what is at an address: `MADV_PAGEOUT` frees a page of any array only if it has another copy.
- A page is freed if it was not written since the last round, which is second chance: a page that was written is sent to
  the disk first. Updates write the rows that they use.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.lowering.paging.unfilled import unfilled
from dflow.tracing.errors import VariableError
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.state.resources import LEAST_MEMORY

LOGGER = logging.getLogger("dflow")

#: Arrays of at most this size stay in memory: the largest value of the allocator's `M_MMAP_THRESHOLD`. It unmaps larger
#: ones when they are freed, so that no page of a file becomes memory of another array.
LEAST_BYTES = LEAST_MEMORY
#: Size of a piece of an array: pieces are filled, and their pages freed, one after the other.
PIECE_BYTES = 16 << 20
#: Shortest wait between two checks of the limit, in s, and the number of a check's processor times that it lasts.
_CHECK_S, _CHECKS = 0.1, 20
#: Share of the limit beyond which programs wait.
_MOST_EXCESS = 1 / 8
#: Share of the limit after which an array that is filled is checked, since a check takes time for each of its pages.
_UNCHECKED = 1 / 16
#: Rounds through all pages in one check.
_ROUNDS = 3

_PAGE = mmap.PAGESIZE
_MAP_FIXED, _MADV_RANDOM, _MADV_WILLNEED, _MADV_PAGEOUT = 0x10, 1, 3, 21
#: Types that XLA packs: a byte has several of their numbers.
_PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
#: Kinds of file systems whose files are in memory.
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(eq=False)
class _Region:
    """Whole pages of an array's memory, from `start` on, that are those of a file; `view` is another map of these."""

    start: int
    size: int
    file: int
    view: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        # Not at the end of the process, while the thread that keeps limits goes on.
        weakref.finalize(self, os.close, self.file).atexit = False
        self.view = mmap.mmap(self.file, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._view_start = _address(np.frombuffer(self.view, np.uint8))

    def in_memory(self, start: int = 0, size: int | None = None) -> int:
        """Return the number of bytes of pages in memory."""
        count = self.size - start if size is None else size
        found = np.empty(count // _PAGE, np.uint8)
        _call("mincore", self._view_start + start, count, found.ctypes.data)
        return int((found & 1).sum()) * _PAGE

    def free(self, start: int, size: int) -> None:
        """Free the pages that are on the disk as they are, and begin to write the others."""
        try:
            _call("madvise", self.start + start, size, _MADV_PAGEOUT)
        except OSError as error:
            if error.errno != errno.ENOMEM:  # XLA has freed the array meanwhile
                raise
        os.posix_fadvise(self.file, start, size, os.POSIX_FADV_DONTNEED)

    def is_mapped(self, maps: set[tuple[int, int]]) -> bool:
        return (self.start, os.fstat(self.file).st_ino) in maps


class PagedMemory:
    """Arrays that have at most `most_bytes` of pages in memory together; thread-safe.

    The limit is checked some times a second, or every few seconds while much is freed or for many pages, so that there
    may be more pages meanwhile. They are pages of a file, which Linux frees itself where memory is short.
    name    of what has the arrays, in errors
    gate    a lock that programs need for a moment to write the arrays: it is held while the limit is exceeded by much,
            so that they wait. Programs that only read do not
    raises  VariableError where files cannot be mapped so
    """

    def __init__(self, name: str, most_bytes: int, gate: AbstractContextManager[Any]) -> None:
        self.name, self.most_bytes, self._gate = name, most_bytes, gate
        self._lock = threading.Lock()
        self._regions: list[_Region] = []
        #: The size in bytes of each variable that is not paged, by key. A finalizer may remove one, without the lock.
        self.unpaged: dict[str, int] = {}
        #: The next piece to free.
        self._hand = 0
        if most_bytes < LEAST_BYTES:
            raise VariableError(f"max_memory of {name!r}: expected at least {LEAST_BYTES} bytes, got {most_bytes}")
        _check_system()
        _KEEPER.add(self)

    def takes(self, type: ArrayType) -> bool:
        """Whether an array of a type is paged: a large one of numbers, each of whole bytes."""
        is_plain = not jnp.issubdtype(type.dtype, jax.dtypes.extended) and type.dtype.name not in _PACKED
        return type.size_bytes > LEAST_BYTES and is_plain

    def hold(self, key: str, type: ArrayType) -> None:
        """Count a variable that is not paged. Raises VariableError if the limit is too low for it."""
        with self._lock:
            needed = self._unpaged_bytes() - self.unpaged.get(key, 0) + type.size_bytes
            if needed <= self.most_bytes:
                self.unpaged[key] = type.size_bytes
                return
        raise VariableError(
            f"max_memory of {self.name!r}: expected at least {needed} bytes, for its variables of at most "
            f"{LEAST_BYTES} bytes, which stay in memory; got {self.most_bytes}",
            "give more, or leave max_memory out; each shard of a table has its share",
        )

    def _unpaged_bytes(self) -> int:
        return sum(tuple(self.unpaged.values()))

    def filled(self, type: ArrayType, pieces: Iterable[tuple[int, Any]] = ()) -> jax.Array:
        """Return a paged array of zeros with pieces set: each has the number of its first row, and some rows."""
        made, rows = self._zeros(type)
        unchecked = 0
        for start, piece in pieces:
            rows[start : start + len(piece)] = piece
            unchecked = self._checked(unchecked + piece.nbytes)
        return made

    def copy(self, value: jax.Array) -> jax.Array:
        """Return a paged copy."""
        value.block_until_ready()  # as the pages are read without XLA, while a program may write them
        source, type = self._region_of(value), array_type_of(value).strong
        if source is None:
            return self.filled(type, pieces_of(np.asarray(value)))
        made, _ = self._zeros(type)
        target = self._region_of(made)
        addresses = value.unsafe_buffer_pointer(), made.unsafe_buffer_pointer()
        # The same bytes are in the whole pages of both if these begin as far behind the address.
        first = source.start - addresses[0]
        if target is None or target.start - addresses[1] != first:
            return self.filled(type, pieces_of(np.asarray(value)))
        unchecked = 0
        for start in range(0, source.size, PIECE_BYTES):
            _copy_range(source.file, target.file, start, min(PIECE_BYTES, source.size - start))
            unchecked = self._checked(unchecked + PIECE_BYTES)
        # The parts of its first and last page, which are no pages of the file.
        old, new = (_bytes_at(address, value.nbytes) for address in addresses)
        new[:first], new[first + source.size :] = old[:first], old[first + source.size :]
        return made

    def adopted(self, value: jax.Array) -> jax.Array:
        """Return the value as a paged array: itself if it is one."""
        if not self.takes(array_type_of(value)) or self._region_of(value) is not None:
            return value
        return self.filled(array_type_of(value).strong, pieces_of(np.asarray(value)))

    def in_memory(self) -> int:
        """Return the number of bytes of pages, and of variables that are not paged, in memory."""
        with self._lock:
            return sum(region.in_memory() for region in self._regions) + self._unpaged_bytes()

    def trim(self) -> None:
        """Free pages until the limit is kept, as far as pages can be written to the disk meanwhile."""
        excess = self.in_memory() - self.most_bytes
        with self._gate if excess > self.most_bytes * _MOST_EXCESS else nullcontext(), self._lock:
            pieces = [
                (region, start, min(PIECE_BYTES, region.size - start))
                for region in self._regions
                for start in range(0, region.size, PIECE_BYTES)
            ]
            for step in range(_ROUNDS * len(pieces)) if excess > 0 else ():
                region, start, size = pieces[self._hand % len(pieces)]
                self._hand += 1
                before = region.in_memory(start, size)
                if before:
                    region.free(start, size)
                    excess -= before - region.in_memory(start, size)
                if excess <= 0:
                    break
                if step % len(pieces) == len(pieces) - 1:
                    for one in self._regions:
                        os.fdatasync(one.file)

    def _checked(self, written: int) -> int:
        """Check the limit if many bytes were written since the last check; return the number since then."""
        if written < self.most_bytes * _UNCHECKED:
            return written
        self.trim()
        return 0

    def forget_freed(self) -> bool:
        """Close the files of arrays that are gone; return whether there are others."""
        with self._lock:
            maps = _mapped_files()
            self._regions = [region for region in self._regions if region.is_mapped(maps)]
            return bool(self._regions)

    def _zeros(self, type: ArrayType) -> tuple[jax.Array, npt.NDArray[Any]]:
        """Return a paged array of zeros, and its memory, to be written before the array is used."""
        self.forget_freed()
        made = unfilled(type)
        made.block_until_ready()
        address = made.unsafe_buffer_pointer()
        start, size = _whole_pages(address, type.size_bytes)
        memory = _bytes_at(address, type.size_bytes)
        region = _Region(start, size, _reserved(self.name, size))
        _map(region.file, start, size)
        memory[: start - address] = memory[start - address + size :] = 0
        with self._lock:
            self._regions.append(region)
        return made, memory.view(type.dtype).reshape(type.shape)

    def _region_of(self, value: jax.Array) -> _Region | None:
        """Return the pages of an array; None if it has none, such as one on several devices."""
        if len(value.sharding.device_set) > 1:
            return None
        start, _ = _whole_pages(value.unsafe_buffer_pointer(), value.nbytes)
        with self._lock:
            maps = _mapped_files()
            return next((one for one in self._regions if one.start == start and one.is_mapped(maps)), None)


class _Keeper:
    """The thread that keeps the limits of this process, while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memories: weakref.WeakSet[PagedMemory] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, memory: PagedMemory) -> None:
        with self._lock:
            self._memories.add(memory)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dflow paged memory", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        wait_s = _CHECK_S
        while True:
            time.sleep(wait_s)
            with self._lock:
                memories = [*self._memories]
                if not memories:
                    self._thread = None
                    return
            begun = time.thread_time()
            while memories:
                memory = memories.pop()
                try:
                    if memory.forget_freed():
                        memory.trim()
                except OSError:
                    LOGGER.exception("the memory of %s cannot be kept within its limit", memory.name)
                del memory  # or it would be kept until the next check
            wait_s = max(_CHECK_S, _CHECKS * (time.thread_time() - begun))


_KEEPER = _Keeper()


def prefetched(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array, and begin to read its pages that are not in memory, in order and many at a time.

    One after the other, as they are touched, takes about ten times as long.
    """
    start, size = _whole_pages(_address(value), value.nbytes)
    if value.flags.c_contiguous and size > 0 and sys.platform == "linux":
        with suppress(OSError):  # without it the pages are read too; kernels without swap refuse it for some
            _call("madvise", start, size, _MADV_WILLNEED)
    return value


def pieces_of(value: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the rows of an array in pieces, each with the number of its first row."""
    rows = max(1, PIECE_BYTES // max(1, value.nbytes // len(value)))
    for start in range(0, len(value), rows):
        yield start, prefetched(value[start : start + rows])


def _whole_pages(address: int, size: int) -> tuple[int, int]:
    """Return the address and size of the whole pages within some bytes."""
    start = -(-address // _PAGE) * _PAGE
    return start, (address + size - start) // _PAGE * _PAGE


def _address(value: npt.NDArray[Any]) -> int:
    return int(value.__array_interface__["data"][0])


def _bytes_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Return memory as an array that may be written; it does not keep the memory."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library. Raises OSError."""
    if getattr(_libc(), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _map(file: int, start: int, size: int) -> None:
    """Have the pages of a file in place of those of an address."""
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mmap(start, size, rights, mmap.MAP_SHARED | _MAP_FIXED, file, 0) != start:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap: {os.strerror(number)}")
    _call("madvise", start, size, _MADV_RANDOM)  # or Linux reads pages around each


def _reserved(name: str, size: int) -> int:
    """Return a file without a name, in the folder for temporary files, with its space on the disk."""
    folder = tempfile.gettempdir()
    if (kind := _file_system(folder)) in _IN_MEMORY:
        raise VariableError(
            f"max_memory of {name!r}: expected a folder on a disk for its pages, got {folder}, which is of {kind}",
            "set the environment variable TMPDIR to a folder on a local disk, for each task",
        )
    with tempfile.TemporaryFile(prefix="dflow-", dir=folder) as opened:
        file = os.dup(opened.fileno())
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.close(file)
        raise VariableError(
            f"max_memory of {name!r}: expected {size} bytes of disk in {folder} for its pages, got: {error.strerror}",
            "set the environment variable TMPDIR to a folder on a larger local disk, for each task",
        ) from error
    return file


def _file_system(folder: str) -> str:
    """Return the kind of the file system of a folder; empty if it is unknown."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        found = (line.split() for line in mounts)
        return next((line[line.index("-") + 1] for line in found if line[2] == number), "")


def _copy_range(source: int, target: int, start: int, size: int) -> None:
    # Not by `copy_file_range`: XFS and Btrfs would share the blocks, and a later write to one could find a full disk.
    os.lseek(target, start, os.SEEK_SET)
    while size:
        copied = os.sendfile(target, source, start, size)
        start, size = start + copied, size - copied


def _mapped_files() -> set[tuple[int, int]]:
    """Return the address and the inode of each map of a file in this process."""
    with open("/proc/self/maps") as maps:
        fields = (line.split(maxsplit=5) for line in maps)
        return {(int(line[0].partition("-")[0], 16), int(line[4])) for line in fields if line[4] != "0"}


@cache
def _check_system() -> None:
    """Raise VariableError if the pages of an array cannot be replaced here, or would stay when the array is gone."""
    expected = "max_memory: expected Linux 5.4 or later, its CPU as JAX's first device, and the C library's allocator"
    remedy = "leave max_memory out"
    if sys.platform != "linux" or jax.devices()[0].platform != "cpu":
        raise VariableError(f"{expected}, got {sys.platform} and {jax.devices()[0]}", remedy)
    made = unfilled(ArrayType(np.dtype(np.uint8), (2 * LEAST_BYTES,)))
    made.block_until_ready()
    start, size = _whole_pages(made.unsafe_buffer_pointer(), 2 * LEAST_BYTES)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        _map(file.fileno(), start, size)
        inode = os.fstat(file.fileno()).st_ino
        try:
            _call("madvise", start, size, _MADV_PAGEOUT)
        except OSError as error:
            raise VariableError(f"{expected}, got Linux {os.uname().release}: {error}", remedy) from error
        if (start, inode) not in _mapped_files():
            raise VariableError(
                f"max_memory: expected a file with one inode in its state and in the maps of the process, got two in "
                f"{tempfile.gettempdir()}",
                "set the environment variable TMPDIR to a folder on a local disk, for each task",
            )
        made.delete()
        if (start, inode) in _mapped_files():
            raise VariableError(f"{expected}, got another allocator, which keeps memory that was freed", remedy)
