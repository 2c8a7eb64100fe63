"""Shared memory for payloads between two processes of one machine; the receiver uses a payload in place.

Why: a copy through the kernel costs as much as several copies in memory, and needs a buffer at the receiver too.

The sender owns the memory and passes its descriptor over the Unix socket. The memory begins with one byte for each
value in use (its flag); the values follow. The sender sets a value's flag, and sends the flag's number, the value's
offset and its size as the frame's payload. The receiver clears the flag when the array made from the value is freed,
which costs no message.

Invariants: the sender writes only into blocks whose flag the receiver has cleared. Each side maps the memory while
anything refers to it. The memory's size is sealed, so neither side can truncate it under the other; the receiver checks
the seal, and that each location lies inside. Both processes are of one user, and could change each other's memory
anyway.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque

import numpy as np

from dflow.distributed.transport.addresses import Address, UnixAddress
from dflow.distributed.transport.link import LOGGER, Limits
from dflow.distributed.wire.codec import Payload, SentPayload, parts_of
from dflow.tracing.errors import TransportClosed, WireError

#: Smaller payloads go over the socket, which costs no more.
SHARED_FROM_BYTES = 64 << 10

#: The size of a page, so that two values never share one.
GRAIN_BYTES = 4096

#: Smaller parts are copied while holding the interpreter's lock, which takes less time than NumPy's function.
_COPIED_WITH_LOCK = 64 << 10

_FLAGS = GRAIN_BYTES
_LOCATION = struct.Struct("<QQQ")
LOCATION_BYTES = _LOCATION.size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MARK = b"M"
_NO_MEMORY = b"-"


class Blocks:
    """The blocks in use of a memory of `size_bytes`: first fit, so that few pages are ever touched.

    Invariants: blocks do not overlap and lie within `size_bytes`; each starts at a multiple of `GRAIN_BYTES`; adjacent
    gaps are merged. This only counts, and is not thread-safe.
    """

    def __init__(self, size_bytes: int) -> None:
        self._gaps: list[tuple[int, int]] = [(0, size_bytes // GRAIN_BYTES * GRAIN_BYTES)]
        self._taken: dict[int, int] = {}

    def take(self, size_bytes: int) -> int | None:
        """Allocate a block; return its offset, or None if no gap is large enough."""
        wanted = -(-max(size_bytes, 1) // GRAIN_BYTES) * GRAIN_BYTES
        for index, (offset, length) in enumerate(self._gaps):
            if length >= wanted:
                if length == wanted:
                    del self._gaps[index]
                else:
                    self._gaps[index] = (offset + wanted, length - wanted)
                self._taken[offset] = wanted
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free the block at `offset`."""
        length = self._taken.pop(offset)
        at = bisect_left(self._gaps, (offset, 0))
        if at < len(self._gaps) and self._gaps[at][0] == offset + length:
            length += self._gaps.pop(at)[1]
        if at > 0 and sum(self._gaps[at - 1]) == offset:
            before, size = self._gaps.pop(at - 1)
            offset, length = before, size + length
        insort(self._gaps, (offset, length))


class SharedPool:
    """The sending end: a memory of `size_bytes` for values, whose pages are allocated when first used."""

    def __init__(self, size_bytes: int) -> None:
        self.descriptor = os.memfd_create("dflow", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, _FLAGS + size_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._bytes = np.frombuffer(mmap.mmap(self.descriptor, _FLAGS + size_bytes), np.uint8)
            self._memory = self._bytes.data
        except BaseException:
            os.close(self.descriptor)
            raise
        self._lock = threading.Lock()
        self._blocks = Blocks(size_bytes)
        self._free_flags = deque(range(_FLAGS))
        #: Flag and offset of each value that the other side may still use.
        self._lent: list[tuple[int, int]] = []

    def put(self, payload: SentPayload) -> bytes | None:
        """Copy `payload` into the memory; return its location for `SharedView.take`, or None if there is no room."""
        size_bytes = len(payload)
        with self._lock:
            self._collect()
            if not self._free_flags:
                return None
            offset = self._blocks.take(size_bytes)
            if offset is None:
                return None
            flag = self._free_flags.popleft()
        # Without the lock, since the copy takes long: no other thread has this block and this flag.
        start = _FLAGS + offset
        for part in parts_of(payload):
            end = start + len(part)
            if len(part) < _COPIED_WITH_LOCK:
                self._memory[start:end] = part
            else:
                np.copyto(self._bytes[start:end], np.frombuffer(part, np.uint8))
            start = end
        self._bytes[flag] = 1  # first: `_collect` frees the values in the list whose flag is 0
        with self._lock:
            self._lent.append((flag, offset))
        return _LOCATION.pack(flag, offset, size_bytes)

    def _collect(self) -> None:
        """Free the blocks and flags that the other side has released."""
        still: list[tuple[int, int]] = []
        for flag, offset in self._lent:
            if self._bytes[flag]:
                still.append((flag, offset))
            else:
                self._blocks.give_back(offset)
                self._free_flags.append(flag)
        self._lent = still


class SharedView:
    """The receiving end of the other side's `SharedPool`; construction closes `descriptor`.

    raises  WireError if the memory's size is not sealed, or is too small; OSError
    """

    def __init__(self, descriptor: int) -> None:
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise WireError("the other side offers a shared memory whose size it could change")
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes < _FLAGS:
                raise WireError(f"a shared memory of {size_bytes} bytes is offered; it has at least {_FLAGS}")
            self._bytes = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
        finally:
            os.close(descriptor)

    def take(self, location: Payload, most_bytes: int) -> memoryview:
        """Return the value at a location, writable and aligned; it is released when nothing refers to it any more.

        raises  WireError if the location is invalid, or the value has more than `most_bytes`
        """
        flag, offset, size_bytes = _LOCATION.unpack(location)
        start = _FLAGS + offset
        if flag >= _FLAGS or offset % GRAIN_BYTES or start + size_bytes > self._bytes.size:
            raise WireError(f"no value of {size_bytes} bytes at {offset} with flag {flag} of {self._bytes.size} bytes")
        if size_bytes > most_bytes:
            raise WireError(f"a payload of {size_bytes} bytes is over the limit of {most_bytes}")
        lent = self._bytes[start : start + size_bytes]
        weakref.finalize(lent, self._bytes.__setitem__, flag, 0).atexit = False
        return lent.data


#: The shared memories of a connection: for sent payloads, and for received ones. Each is None if the sending side
#: could not make its memory, or if the sides share none; its payloads go over the socket.
SharedMemory = tuple[SharedPool | None, SharedView | None]


def agree_on_memory(sock: socket.socket, size_bytes: int) -> SharedMemory:
    """Exchange memories with the other side, which calls this too; raises WireError, TransportClosed or OSError."""
    try:
        pool = SharedPool(size_bytes)
    except OSError as error:  # a limit on the size of files holds for memory too
        LOGGER.warning("no shared memory of %d bytes: %s; payloads go over the socket", size_bytes, error)
        return None, _swap(sock, None)
    try:
        return pool, _swap(sock, pool.descriptor)
    finally:
        os.close(pool.descriptor)  # the memory stays mapped here


def may_share(address: Address, limits: Limits) -> bool:
    """Whether a connection at `address` can share memory: over a Unix socket, if `limits` allow."""
    return isinstance(address, UnixAddress) and limits.shared_bytes > 0


def _swap(sock: socket.socket, descriptor: int | None) -> SharedView | None:
    """Send the descriptor of a memory, or that there is none; return the other side's memory, if it has one.

    raises  TransportClosed, WireError, OSError
    """
    if descriptor is None:
        sock.sendall(_NO_MEMORY)
    else:
        socket.send_fds(sock, [_MARK], [descriptor])
    mark, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    if mark == _NO_MEMORY and not descriptors:
        return None
    if mark == _MARK and len(descriptors) == 1:
        return SharedView(descriptors[0])
    for one in descriptors:
        os.close(one)
    if not mark:
        raise TransportClosed("the other side closed the connection before it offered shared memory")
    raise WireError("the other side offers shared memory but no descriptor came")
