"""Connections within one process.

Why: tests of many tasks run in one process, faster and easier to follow than over sockets. Messages pass through
the codec and payloads are copied, so that a value that cannot be encoded, or is changed after sending, fails here too.
Unlike a socket, a link accepts any number of bytes without making the sender wait.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import msgspec

from dflow.distributed.transport.base import Handler, Peer
from dflow.distributed.transport.buffer_pool import RECEIVED
from dflow.distributed.transport.link import LOGGER, MIN_ALIGNED_BYTES, Frame, Limits, become_reader
from dflow.distributed.wire.codec import joined
from dflow.tracing.errors import DeadlineExceeded, TransportClosed, WireError

#: Interval in seconds between calls of `is_wanted` while connecting.
_LOOK_S = 0.02
_CLOSED = "the other side closed the connection"


class MemoryNetwork:
    """A network of named addresses in this process; listening at "" takes a free address.

    `is_threaded`  whether each end of a connection has a reader thread; otherwise the sending thread delivers a message
    """

    def __init__(self, limits: Limits | None = None, *, is_threaded: bool = True) -> None:
        self._limits, self.is_threaded = limits or Limits(), is_threaded
        self._changed = threading.Condition()
        self._listeners: dict[str, MemoryListener] = {}
        self._last_free = 0

    def listen(self, address: str, *, name: str, handler: Handler, resume_s: float | None = None) -> MemoryListener:
        """Accept connections at `address`; raises OSError if another listener has it."""
        with self._changed:
            if not address:
                self._last_free += 1
                address = f"memory:{self._last_free}"
            if address in self._listeners:
                raise OSError(f"address {address!r} is already listened on; close the other listener or use ''")
            listener = MemoryListener(self, address, name, handler)
            self._listeners[address] = listener
            self._changed.notify_all()
        return listener

    def connect(
        self,
        address: str,
        *,
        name: str,
        handler: Handler,
        who: str,
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
        resume_s: float | None = None,
    ) -> Peer:
        """Connect to the listener at `address`, waiting for it to appear; see `base.Transport.connect`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (listener := self._listeners.get(address)) is None:
                left_s = deadline - time.monotonic()
                if not self._changed.wait(min(left_s, _LOOK_S)) and (left_s <= _LOOK_S or not is_wanted()):
                    raise DeadlineExceeded(
                        f"{who} at {address} could not be reached within {timeout_s:g} s: nothing listens there; "
                        "check that it runs and that the address is right"
                    )
        return listener.accept(name, handler, self._limits)

    def remove(self, listener: MemoryListener) -> None:
        """Free the address of a listener."""
        with self._changed:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]


class MemoryListener:
    """A named address; see `base.Listener`."""

    def __init__(self, network: MemoryNetwork, address: str, name: str, handler: Handler) -> None:
        #: The address to connect to.
        self.address = address
        self._network = network
        self._name = name
        self._handler = handler
        self._lock = threading.Lock()
        self._accepted: list[Peer] = []

    def accept(self, name: str, handler: Handler, limits: Limits) -> Peer:
        """Make a connection to this listener and return the caller's end."""
        near, far = _MemoryLink(), _MemoryLink()
        near.other, far.other = far, near
        ours = Peer(near, local=self._name, remote=name, handler=self._handler, limits=limits)
        theirs = Peer(far, local=name, remote=self._name, handler=handler, limits=limits)
        with self._lock:
            self._accepted = [*(peer for peer in self._accepted if not peer.closed), ours]
        for peer, link in ((ours, near), (theirs, far)):
            if self._network.is_threaded:
                threading.Thread(target=_read, args=(peer, link), name=f"dflow read {name}", daemon=True).start()
            else:
                link.reader = peer
        return theirs

    def close(self) -> None:
        """Free the address and end every connection made here."""
        self._network.remove(self)
        with self._lock:
            accepted = list(self._accepted)
        for peer in accepted:
            peer.close(f"{self._name} stopped listening")


class _MemoryLink:
    """One end of a connection. The `other` delivers frames to its `reader`, or without one, into the queue `frames`."""

    other: _MemoryLink

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.reader: Peer | None = None
        self.is_closed = False

    def send(self, frame: Frame) -> None:
        if self.is_closed:
            raise TransportClosed(_CLOSED)
        size_bytes = len(frame.payload)
        payload = RECEIVED.take(size_bytes) if size_bytes >= MIN_ALIGNED_BYTES else memoryview(bytearray(size_bytes))
        payload[:] = joined(frame.payload)
        received = msgspec.structs.replace(frame, payload=payload, on_released=None)
        if self.other.reader is None:
            self.other.frames.put(received)
        else:
            self.other.reader.arrived(received)
        if frame.on_released is not None:
            frame.on_released()

    def send_with_next(self, frame: Frame) -> None:
        self.send(frame)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = self.other.is_closed = True
        for end in (self.other, self):
            end.frames.put(None)
            if end.reader is not None:
                end.reader.close(_CLOSED)


def _read(peer: Peer, link: _MemoryLink) -> None:
    become_reader()
    reason = _CLOSED
    while (frame := link.frames.get()) is not None:
        try:
            peer.arrived(frame)
        except WireError as error:
            reason = f"the other side broke the protocol: {error}"
            LOGGER.warning("connection to %s closed: %s", peer.name, reason)
            break
    peer.close(reason)
