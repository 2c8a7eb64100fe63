"""One end of a session over sockets: it sends and reads frames, and goes on over a new socket when one breaks.

Why: a sent message must reach the other process once, even when sockets break.

Invariants:

- One thread at a time reads a connection and closes its streams: a thread of the reactor, and between two streams the
  thread that gets the next one.
- The session is used under `_lock`, which is never held during I/O.
- A stream that ends without a LAST frame from the other side has broken. A connection without a renewal (the other side
  requested no session) ends with its stream. Any other ends by `close`, by the other side's LAST frame, by a protocol
  error, by an error in reading, or when it cannot be renewed.
- `on_released` of a payload is called once: when the payload was copied or acknowledged, or the connection has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec

from dflow.distributed.transport.base import Limits, OnReleased
from dflow.distributed.transport.exchange import LOGGER, Exchange, Frame, Kind, become_reader, on_reader_thread
from dflow.distributed.transport.framing import Ahead, Arrived, FrameReader, checksum_of, pack_header, stalled
from dflow.distributed.transport.reactor import Reactor, give_way
from dflow.distributed.transport.send_queue import SendQueue, gather, send_gathered
from dflow.distributed.transport.session import Session
from dflow.distributed.transport.shared_memory import SHARED_FROM_BYTES, SharedMemory
from dflow.distributed.transport.stream import Parts, Stream
from dflow.tracing.errors import TransportClosed, WireError

#: Payloads up to this size are copied when sent, which costs less than retaining the owner's memory.
COPIED_BYTES = 32 << 10

#: Frames up to this size are joined into one buffer, since each buffer costs the system time.
_JOINED_BYTES = 4 << 10

_ACK = Frame(Kind.ACK, 0, b"", b"")
_LAST = Frame(Kind.LAST, 0, b"", b"")
_CLOSED = "the other side closed the connection"


class Renewed(NamedTuple):
    """A new stream for the session, and the number of frames that the other side has received."""

    stream: Stream
    peer_received: int


class _End(NamedTuple):
    """Why a stream ended, and whether it broke, so that the session may go on."""

    reason: str
    has_broken: bool


class Renewal(Protocol):
    """Gets a new stream for a connection."""

    def renew(self, received: int, reason: str) -> Renewed | str:
        """Wait for a new stream to the same process; return it, or the reason why there is none.

        received  the number of frames received here, to send to the other side
        reason    why the last stream ended, with which the returned reason begins
        """
        ...

    def cancel(self) -> None:
        """Make `renew` return soon, now and in later calls."""
        ...


class _Kept(msgspec.Struct, frozen=True):
    """A retained frame, which may have to be resent."""

    parts: Parts
    on_released: OnReleased | None


class Connection:
    """The `Link` of an exchange, over a stream that may be renewed."""

    def __init__(
        self,
        stream: Stream,
        limits: Limits,
        renewal: Renewal | None,
        reactor: Reactor,
        memory: SharedMemory | None = None,
    ) -> None:
        self._limits = limits
        self._reactor = reactor
        self._memory = memory
        self._renewal = renewal
        self._stream = stream
        self._queue = SendQueue(stream, limits, self)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._session: Session[_Kept] = Session()
        self._is_closed = False
        self._is_broken = False
        self._exchange: Exchange | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._reader = FrameReader(stream, limits, memory and memory.view)

    @property
    def stream(self) -> Stream:
        """The current stream, or the last one if it broke."""
        return self._stream

    @property
    def is_broken(self) -> bool:
        """Whether the last stream broke and is not replaced yet."""
        return self._is_broken

    def start(self, exchange: Exchange, on_end: Callable[[], None] = lambda: None) -> None:
        """Read for `exchange` from now on; when the connection ends, close the exchange and call `on_end`.

        raises  RuntimeError if no reader thread can be started
        """
        self._exchange, self._on_end = exchange, on_end
        self._reactor.add(self._stream.file, self)

    # As a link; see `exchange.Link`.

    def send(self, frame: Frame) -> None:
        """Send or retain a frame; see `Link.send`."""
        on_released = None
        if frame.payload and (copied := self._copied(frame)) is not None:
            on_released, frame = frame.on_released, copied
        self._wait_for_room()
        self._queue.send(frame)
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
            self._queue.say_last(_LAST)
            self._renewal.cancel()
        stream.shut_down()
        _release(kept)

    # The callbacks of the outlet; see `outlet.Packing`.

    def pack(self, frame: Frame) -> Parts:
        """Number, retain and serialise a frame."""
        checksum = checksum_of((frame.meta, frame.payload)) if self._limits.checksums else None
        with self._lock:
            sequence = 0
            parts: Parts = []
            if self._renewal is not None and frame.kind <= Kind.NOTIFY and not self._is_closed:
                size_bytes = len(frame.meta) + len(frame.payload)
                sequence = self._session.send(_Kept(parts, frame.on_released), size_bytes)
            acknowledged = self._session.say_received()
            header = pack_header(frame, checksum=checksum, sequence=sequence, acknowledged=acknowledged)
            if len(frame.meta) + len(frame.payload) <= _JOINED_BYTES:
                parts.append(memoryview(b"".join((header, frame.meta, frame.payload))))
            else:
                parts.extend(memoryview(part) for part in (header, frame.meta, frame.payload) if part)
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
        """Return the frame with its payload copied, so that the original can be released; None to send it uncopied."""
        size_bytes = len(frame.payload)
        if size_bytes >= SHARED_FROM_BYTES and self._memory is not None:
            place = self._memory.pool.put(frame.payload)
            if place is not None:
                return msgspec.structs.replace(frame, payload=place, on_released=None, is_shared=True)
        if size_bytes <= COPIED_BYTES or (self._renewal is None and frame.on_released is not None):
            return msgspec.structs.replace(frame, payload=bytes(frame.payload), on_released=None)
        return None

    def _wait_for_room(self) -> None:
        """Wait, unless on a reader thread, until few enough bytes are unacknowledged.

        raises  TransportClosed on a time-out, or if too many frames wait for a new stream
        """
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

    # Reading; see `reactor.Source`.

    def read(self) -> bool:
        """Handle the frames that have arrived; see `Source.read`."""
        gather()
        try:
            ahead = self._read()
        except WireError as error:
            ahead = _End(f"the other side broke the protocol: {error}", has_broken=False)
            LOGGER.warning("connection to %s closed: %s", self._peer.name, ahead.reason)
        except MemoryError as error:
            ahead = _End(f"there is no memory for a frame: {error}", has_broken=False)
        except OSError as error:
            ahead = _End(error.strerror or str(error) or type(error).__name__, has_broken=True)
        except Exception:
            LOGGER.exception("reading the connection to %s failed", self._peer.name)
            ahead = _End("reading failed", has_broken=False)
        send_gathered()
        if isinstance(ahead, _End):
            self._stream_ended(ahead)
            return False
        return ahead is Ahead.PART

    def stalled(self) -> None:
        """Treat the stream as broken; see `Source.stalled`."""
        self._stream_ended(_End(str(stalled(self._limits)), has_broken=True))

    @property
    def _peer(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def _read(self) -> Ahead | _End:
        """Handle the frames that have arrived; return the state of the buffer, or the end of the stream."""
        reader = self._reader
        while True:
            try:
                if not reader.receive():
                    return _End(_CLOSED, has_broken=True)
            except BlockingIOError:
                return reader.ahead()
            while (ahead := reader.ahead()) is Ahead.WHOLE or ahead is Ahead.LARGE:
                if ahead is Ahead.LARGE:
                    give_way()
                arrived = reader.read()
                if arrived.frame.kind is Kind.LAST:
                    return _End(_CLOSED, has_broken=False)
                self._take(arrived, self._peer)
            if not self._stream.may_hold_back:
                return ahead

    def _stream_ended(self, end: _End) -> None:
        """Start a thread that renews the stream, or end the connection."""
        stream = self._stream
        self._is_broken = True
        self._reactor.remove(stream.file)
        stream.shut_down()
        self._queue.close_stream(stream)
        if self._renewal is None or not end.has_broken or self._is_closed:
            self._end(end.reason)
            return
        LOGGER.info("connection to %s broke and is resumed: %s", self._peer.name, end.reason)
        try:
            threading.Thread(
                target=self._renew, args=(self._renewal, end.reason), name=f"dflow renew {self._peer.name}", daemon=True
            ).start()
        except RuntimeError as error:
            self._end(f"{end.reason}, and {error}")

    def _end(self, reason: str) -> None:
        self._peer.close(reason)
        self._on_end()

    def _renew(self, renewal: Renewal, reason: str) -> None:
        become_reader()
        try:
            renewed = renewal.renew(self._session.received, reason)
            if isinstance(renewed, Renewed):
                reason = self._resume(renewed.stream, renewed.peer_received)
            else:
                reason = renewed
        except Exception:
            LOGGER.exception("resuming the connection to %s failed", self._peer.name)
            reason = "resuming failed"
        if reason:
            self._end(reason)

    def _take(self, arrived: Arrived, exchange: Exchange) -> None:
        frame, sequence, acknowledged = arrived.frame, arrived.sequence, arrived.acknowledged
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
                self._queue.send(_ACK)

    def _resume(self, stream: Stream, peer_received: int) -> str:
        """Continue over `stream`; return why that is impossible, or "" on success."""
        with self._lock:
            try:
                released, _ = self._session.resume(peer_received)
            except WireError as error:
                stream.close()
                return str(error)
            self._stream = stream
            self._reader = FrameReader(stream, self._limits, self._memory and self._memory.view)
            self._is_broken = False
            self._room.notify_all()
            is_closed = self._is_closed
        _release(released)
        if is_closed:
            stream.shut_down()
        self._queue.resume(stream, lambda: self._again(peer_received))
        self._reactor.add(stream.file, self)
        return ""

    def _again(self, peer_received: int) -> list[Parts]:
        with self._lock:
            return [kept.parts for kept in self._session.resume(peer_received).again]


def _release(kept: Iterable[_Kept]) -> None:
    for one in kept:
        if one.on_released is not None:
            one.on_released()
