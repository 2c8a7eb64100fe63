"""The byte stream that carries frames, and deadlines for using it; one that encrypts is in `security.tls_stream`."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dflow.tracing.errors import DeadlineExceeded, TransportClosed

Parts = list[memoryview]

_TIMEVAL = struct.Struct("@ll")
#: Most buffers that Linux accepts in one call.
_MOST_PARTS = 1024


class Deadline(NamedTuple):
    """The time of the monotonic clock at which a time-out ends, and that time-out, in seconds."""

    at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Return the deadline `timeout_s` from now."""
        return cls(time.monotonic() + timeout_s, timeout_s)

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.at

    @property
    def left_s(self) -> float:
        """The time left, at least 1 ms."""
        return max(self.at - time.monotonic(), 0.001)


class Stream:
    """A plain socket as a stream. One thread may read while another sends; any thread may call `shut_down`.

    `may_hold_back`  whether data may be buffered where polling `file` does not see it: read until `receive` raises
    """

    may_hold_back = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        #: Close the file descriptor; called by the thread that reads.
        self.close = sock.close

    @property
    def file(self) -> int:
        """The file descriptor to poll for data."""
        return self._sock.fileno()

    def send(self, parts: Sequence[memoryview], *, waits: bool = True) -> int:
        """Send some of `parts`, waiting for room if `waits`; return the number of bytes sent.

        0 means that there was no room, with `waits` within the time-out. Raises OSError.
        """
        try:
            return self._sock.sendmsg(parts[:_MOST_PARTS], (), 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def receive(self, view: memoryview, *, waits: bool = True) -> int:
        """Receive some bytes, waiting for them if `waits`; return their number, 0 at the end of the stream.

        raises  BlockingIOError if there are none, with `waits` within the time-out; OSError
        """
        return self._sock.recv_into(view, 0, 0 if waits else socket.MSG_DONTWAIT)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time that `send` and `receive` may wait.

        This is done in the kernel, which saves the `poll` that Python would do in each call.
        """
        whole_s = int(timeout_s)
        # At least 1 us: to the kernel, 0 is no time-out at all.
        value = _TIMEVAL.pack(whole_s, max(int((timeout_s - whole_s) * 1e6), 1 if whole_s == 0 else 0))
        self._sock.settimeout(None)  # else Python has the socket not block, and polls
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def shut_down(self) -> None:
        """End both directions and wake the threads that wait on them; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def without(parts: Iterable[memoryview], sent_bytes: int) -> Parts:
    """Return `parts` without their first `sent_bytes` bytes, and without empty parts."""
    rest: Parts = []
    for part, end in zip(parts, itertools.accumulate(map(len, parts)), strict=True):
        start = max(0, len(part) - (end - sent_bytes))
        if start < len(part):
            rest.append(part[start:])
    return rest


def reason_of(error: BaseException) -> str:
    """Return why a connection failed, in the system's words if it is an error of the system."""
    system = error.strerror if isinstance(error, OSError) else None
    return system or str(error) or type(error).__name__


def send_by(stream: Stream, parts: Iterable[memoryview], deadline: Deadline, late: str) -> None:
    """Send all of `parts`, changing the time-out of `stream`; raises DeadlineExceeded with the text `late`; OSError."""
    rest = list(parts)
    while rest:
        stream.set_timeout(deadline.left_s)
        sent = stream.send(rest)
        if not sent or deadline.has_passed:
            raise DeadlineExceeded(late)
        rest = without(rest, sent)


def receive_by(stream: Stream, size_bytes: int, deadline: Deadline, *, late: str, closed: str) -> bytearray:
    """Receive exactly `size_bytes` bytes, changing the time-out of `stream`.

    raises  DeadlineExceeded with the text `late`; TransportClosed with the text `closed`; OSError
    """
    data = bytearray(size_bytes)
    rest = memoryview(data)
    while rest:
        stream.set_timeout(deadline.left_s)
        try:
            if deadline.has_passed:
                raise BlockingIOError
            count = stream.receive(rest)
        except BlockingIOError:
            raise DeadlineExceeded(late) from None
        if not count:
            raise TransportClosed(closed)
        rest = rest[count:]
    return data
