"""Bytes in order between two ends of a connection: what frames are carried by.

Why: sending and reading frames is the same over a plain socket and over an encrypted one, so both stand behind this.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

Parts = list[memoryview]

_TIMEVAL = struct.Struct("@ll")
#: Linux takes so many in one call, and refuses more.
_MOST_PARTS = 1024


class Stream(Protocol):
    """One end of a connection. One thread reads and one sends at a time, both at once; any may shut it down."""

    def send(self, parts: Sequence[memoryview]) -> int:
        """Send some of `parts`, waiting for room; returns how many bytes went, 0 if the time-out passed. OSError."""
        ...

    def send_now(self, parts: Sequence[memoryview]) -> int:
        """Send what goes without waiting; returns how many bytes went, maybe 0. OSError."""
        ...

    @property
    def file(self) -> int:
        """The descriptor by which the system says that something came."""
        ...

    @property
    def may_hold_back(self) -> bool:
        """Whether bytes may be here that the system has given, so that only `receive_now` says that all came."""
        ...

    def receive_into(self, view: memoryview) -> int:
        """Receive some bytes, waiting for them; returns how many came, 0 at the end.

        raises  BlockingIOError if none came within the time-out; OSError
        """
        ...

    def receive_now(self, view: memoryview) -> int:
        """Receive what is here; returns how many bytes, 0 at the end; raises BlockingIOError if none; OSError."""
        ...

    def set_timeout(self, timeout_s: float) -> None:
        """How long `send` and `receive_into` wait from now on."""
        ...

    def shut_down(self) -> None:
        """End both directions and wake whoever waits; a second call does nothing."""
        ...

    def close(self) -> None:
        """Give the connection back to the system; called by the thread that reads."""
        ...


class SocketStream:
    """A plain socket as a `Stream`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, parts: Sequence[memoryview]) -> int:
        """Send some of `parts`, waiting for room; see `Stream.send`."""
        try:
            return self._sock.sendmsg(parts[:_MOST_PARTS])
        except BlockingIOError:
            return 0

    def send_now(self, parts: Sequence[memoryview]) -> int:
        """Send what the socket takes at once; see `Stream.send_now`."""
        try:
            return self._sock.sendmsg(parts[:_MOST_PARTS], (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    @property
    def file(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    @property
    def may_hold_back(self) -> bool:
        """False: all that is here is the system's."""
        return False

    def receive_into(self, view: memoryview) -> int:
        """Receive some bytes; see `Stream.receive_into`."""
        return self._sock.recv_into(view)

    def receive_now(self, view: memoryview) -> int:
        """Receive what is here; see `Stream.receive_now`."""
        return self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time-outs in the kernel, where they cost nothing to calls that do not wait."""
        whole_s = int(timeout_s)
        value = _TIMEVAL.pack(whole_s, max(int((timeout_s - whole_s) * 1e6), 1 if whole_s == 0 else 0))
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def shut_down(self) -> None:
        """Wake whoever waits on the socket."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def without(parts: Iterable[memoryview], sent_bytes: int) -> Parts:
    """What is left of `parts` once their first `sent_bytes` are gone; empty parts are left out."""
    rest: Parts = []
    for part, end in zip(parts, itertools.accumulate(map(len, parts)), strict=True):
        start = max(0, len(part) - (end - sent_bytes))
        if start < len(part):
            rest.append(part[start:])
    return rest
