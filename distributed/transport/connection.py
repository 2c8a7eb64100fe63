"""One end of a session over the sockets: what sends, what reads, and what goes on over a new socket when one breaks.

Why: a message that was handed over must reach the other process once, whatever happens to the sockets between.

Invariants:

- One thread reads a connection for all its life, over one stream after the other; it alone closes them.
- The session is touched under `_lock`, which is held for no I/O.
- A stream that ends without the other side's last word has broken. A connection without a renewal (the other side did
  not ask for a session) ends with its stream; any other ends by `close`, by the other side's last word, by a breach of
  the protocol, or when it cannot be renewed.
- `on_released` of a payload is called once: when the other side has it, or the connection has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from dflow.distributed.transport.base import Limits, OnReleased
from dflow.distributed.transport.exchange import LOGGER, Exchange, Frame, Kind, become_reader, on_reader_thread
from dflow.distributed.transport.framing import Arrived, FrameReader, checksum_of, pack_header
from dflow.distributed.transport.outlet import Outlet
from dflow.distributed.transport.session import Session
from dflow.distributed.transport.shared_memory import SHARED_FROM_BYTES, SharedMemory
from dflow.distributed.transport.stream import Parts, Stream
from dflow.tracing.errors import TransportClosed, WireError

#: Payloads up to this size are copied when they are sent, which costs less than keeping their memory from its owner.
COPIED_BYTES = 32 << 10

_ACK = Frame(Kind.ACK, 0, b"", b"")
_LAST = Frame(Kind.LAST, 0, b"", b"")
_CLOSED = "the other side closed the connection"


class Renewed(NamedTuple):
    """A stream on which the session goes on, and how many frames the other side has."""

    stream: Stream
    peer_received: int


class Renewal(Protocol):
    """How a connection gets a new stream."""

    def renew(self, received: int, reason: str) -> Renewed | str:
        """A new stream to the same process, told that `received` frames are here; or why there is none."""
        ...

    def cancel(self) -> None:
        """Let `renew` return at once, now and later."""
        ...


class _Kept(NamedTuple):
    """A frame that may have to be sent again."""

    parts: Parts
    on_released: OnReleased | None


class Connection:
    """The `Link` of an exchange, over a stream that may be renewed."""

    def __init__(
        self, stream: Stream, limits: Limits, renewal: Renewal | None, memory: SharedMemory | None = None
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._renewal = renewal
        self._stream = stream
        self._outlet = Outlet(stream, limits, self)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._session: Session[_Kept] = Session()
        self._is_closed = False
        self._is_broken = False
        self._exchange: Exchange | None = None

    @property
    def stream(self) -> Stream:
        """The stream it runs over, or ran over until that broke."""
        return self._stream

    @property
    def is_broken(self) -> bool:
        """Whether there is no stream now."""
        return self._is_broken

    def serve(self, exchange: Exchange) -> None:
        """Read for `exchange` until the connection ends, and close it then; on a thread of its own."""
        become_reader()
        self._exchange = exchange
        try:
            reason = self._read_streams(exchange)
        except BaseException:
            reason = "reading failed"
            raise
        finally:
            exchange.close(reason)

    # As a link; see `exchange.Link`.

    def send(self, frame: Frame) -> None:
        """Send or retain a frame; see `Link.send`."""
        on_released = None
        if frame.payload and (copied := self._copied(frame)) is not None:
            on_released, frame = frame.on_released, copied
        self._wait_for_room()
        self._outlet.send(frame)
        if on_released is not None:
            on_released()

    def close(self) -> None:
        """End the connection; see `Link.close`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            stream, kept = self._stream, self._session.end()
            self._room.notify_all()
        if self._renewal is not None:
            self._outlet.say_last(_LAST)
            self._renewal.cancel()
        stream.shut_down()
        _release(kept)

    # As what an outlet sends for; see `outlet.Packing`.

    def pack(self, frame: Frame) -> Parts:
        """Number, retain and write a frame."""
        checksum = checksum_of((frame.meta, frame.payload)) if self._limits.checksums else None
        body = [memoryview(part) for part in (frame.meta, frame.payload) if part]
        with self._lock:
            sequence = 0
            parts: Parts = []
            if self._renewal is not None and frame.kind <= Kind.NOTIFY and not self._is_closed:
                size_bytes = len(frame.meta) + len(frame.payload)
                sequence = self._session.send(_Kept(parts, frame.on_released), size_bytes)
            acknowledged = self._session.say_received()
            header = pack_header(frame, checksum=checksum, sequence=sequence, acknowledged=acknowledged)
            parts.append(memoryview(header))
            parts.extend(body)
        return parts

    def broke(self, stream: Stream, reason: str) -> bool:
        """Wake the reader, which renews the stream; see `Packing.broke`."""
        stream.shut_down()
        return self._renewal is not None and not self._is_closed

    def end(self, reason: str) -> None:
        """Close the exchange; see `Packing.end`."""
        if self._exchange is not None:
            self._exchange.close(reason)

    # Sending.

    def _copied(self, frame: Frame) -> Frame | None:
        """The frame with a copy of its payload, which its sender may have back at once; None to send it as it is."""
        size_bytes = len(frame.payload)
        if size_bytes >= SHARED_FROM_BYTES and self._memory is not None:
            place = self._memory.pool.put(frame.payload)
            if place is not None:
                return frame._replace(payload=place, on_released=None, is_shared=True)
        if size_bytes <= COPIED_BYTES or (self._renewal is None and frame.on_released is not None):
            return frame._replace(payload=bytes(frame.payload), on_released=None)
        return None

    def _wait_for_room(self) -> None:
        """Wait while the other side has yet to acknowledge much; raises TransportClosed if it does not."""
        session, limits = self._session, self._limits
        if self._is_broken and session.unacknowledged_frames >= limits.max_unsent:
            raise TransportClosed(f"the other side cannot be reached, and {session.unacknowledged_frames} frames wait")
        if session.unacknowledged_bytes <= limits.max_retained_bytes or on_reader_thread():
            return
        with self._room:
            has_room = self._room.wait_for(
                lambda: self._is_closed or session.unacknowledged_bytes <= limits.max_retained_bytes,
                limits.stall_timeout_s,
            )
        if not has_room:
            raise TransportClosed(
                f"the other side took nothing of {session.unacknowledged_bytes} bytes for {limits.stall_timeout_s:g} s"
            )

    # Reading.

    def _read_streams(self, exchange: Exchange) -> str:
        stream = self._stream
        while True:
            try:
                reason, has_broken = self._read(stream, exchange)
            finally:
                self._is_broken = True
                stream.shut_down()
                self._outlet.close_stream(stream)
            if self._renewal is None or not has_broken or self._is_closed:
                return reason
            LOGGER.info("connection to %s broke and is resumed: %s", exchange.name, reason)
            renewed = self._renewal.renew(self._session.received, reason)
            if isinstance(renewed, str):
                return renewed
            stream = renewed.stream
            try:
                self._resume(stream, renewed.peer_received)
            except WireError as error:
                stream.close()
                return str(error)

    def _read(self, stream: Stream, exchange: Exchange) -> tuple[str, bool]:
        """Hand every frame to the exchange; returns why there are no more, and whether the stream broke."""
        reader = FrameReader(stream, self._limits, self._memory and self._memory.view)
        try:
            while (arrived := reader.read()) is not None:
                if arrived.frame.kind is Kind.LAST:
                    return _CLOSED, False
                self._take(arrived, exchange)
        except WireError as error:
            reason = f"the other side broke the protocol: {error}"
            LOGGER.warning("connection to %s closed: %s", exchange.name, reason)
            return reason, False
        except MemoryError as error:
            return f"there is no memory for a frame: {error}", False
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__, True
        return _CLOSED, True

    def _take(self, arrived: Arrived, exchange: Exchange) -> None:
        frame, sequence, acknowledged = arrived
        is_message = frame.kind <= Kind.NOTIFY
        if is_message and (sequence == 0) != (self._renewal is None):
            raise WireError(f"a message has number {sequence} in {'no' if sequence else 'a'} session")
        with self._lock:
            kept = self._session.acknowledge(acknowledged)
            is_new = not sequence or self._session.receive(sequence, len(frame.payload) + len(frame.meta))
            if kept:
                self._room.notify_all()
        _release(kept)
        if is_message and is_new:
            exchange.arrived(frame)
            if sequence and self._session.ack_due:
                self._outlet.send(_ACK)

    def _resume(self, stream: Stream, peer_received: int) -> None:
        with self._lock:
            released, _ = self._session.resume(peer_received)
            self._stream = stream
            self._is_broken = False
            self._room.notify_all()
            is_closed = self._is_closed
        _release(released)
        if is_closed:
            stream.shut_down()
        self._outlet.resume(stream, lambda: self._again(peer_received))

    def _again(self, peer_received: int) -> list[Parts]:
        with self._lock:
            return [kept.parts for kept in self._session.resume(peer_received).again]


def _release(kept: Iterable[_Kept]) -> None:
    for one in kept:
        if one.on_released is not None:
            one.on_released()
