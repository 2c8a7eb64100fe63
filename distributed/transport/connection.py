"""One end of a session over sockets: it sends and reads frames, and continues over a new socket when one breaks.

Why: a sent message must reach the other process once, even when sockets break.

Ownership: a `Peer` or a listener holds a connection; the connection holds its send queue, session, reader and
reactor. It knows the code above it as functions.

Invariants:

- One thread at a time reads a connection and closes its streams: a thread of the reactor.
- The session is used under `_lock`, which is never held during I/O.
- A stream that ends without a LAST frame from the other side has broken, and the connection is recovered. It ends by
  `close`, by the other side's LAST frame, by a protocol error, by an error in reading, or when it cannot be recovered.
- `on_released` of a payload is called once: when the payload was copied or acknowledged, or the connection has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import msgspec

from dflow.distributed.transport.framing import FrameReader, pack_header, stalled
from dflow.distributed.transport.link import LOGGER, Frame, Kind, Limits, OnReleased, become_reader, on_reader_thread
from dflow.distributed.transport.reactor import Reactor
from dflow.distributed.transport.send_queue import SendQueue, flush
from dflow.distributed.transport.session import Retained, Session
from dflow.distributed.transport.shared_memory import SHARED_FROM_BYTES, SharedMemory
from dflow.distributed.transport.stream import Deadline, Parts, Stream, reason_of
from dflow.distributed.wire.codec import joined, parts_of
from dflow.tracing.errors import DeadlineExceeded, TransportClosed, WireError

#: Payloads up to this size are copied when sent, which costs less than retaining the owner's memory.
COPIED_BYTES = 32 << 10

#: Frames up to this size are joined into one buffer, since each buffer costs the system time.
_JOINED_BYTES = 4 << 10

_ACK = Frame(Kind.ACK, 0, b"", b"")
_LAST = Frame(Kind.LAST, 0, b"", b"")
_CLOSED = "the other side closed the connection"

#: Called on a new thread with a connection, its stream that broke, and the reason. It returns "" after a call of
#: `Connection.resume`, or why the connection ends, which begins with the given reason.
Recover = Callable[["Connection", Stream, str], str]


_ON_RELEASED = attrgetter("on_released")


class Connection:
    """The link of a peer, over a stream that is replaced when it breaks; `name` is that of the other side."""

    def __init__(self, stream: Stream, name: str, limits: Limits, reactor: Reactor, recover: Recover) -> None:
        self._stream = stream
        self._name = name
        self._limits = limits
        self._reactor = reactor
        self._recover = recover
        self._queue = SendQueue(stream, limits, self._pack)
        #: Send queued frames; leave to a drain thread what would block.
        self.flush = self._queue.flush
        self._lock = threading.Lock()
        #: Notified when frames are acknowledged, and when the connection breaks, is resumed or closed.
        self._changed = threading.Condition(self._lock)
        #: Number of threads that wait for acknowledgements.
        self._waiting_for_room = 0
        self.session: Session[Parts] = Session()
        #: Whether this side has closed the connection.
        self.is_closed = False
        #: Whether the last stream broke and is not replaced yet. Meanwhile the session receives nothing.
        self.is_broken = False

    def start(
        self, on_frame: Callable[[Frame], None], on_end: Callable[[str], None], memory: SharedMemory = (None, None)
    ) -> None:
        """Read from now on: call `on_frame` with each message, and `on_end` with the reason when the connection ends.

        raises  RuntimeError if no reader thread can be started
        """
        self._on_frame, self._on_end = on_frame, on_end
        self._pool, self._view = memory
        self._read_from(self._stream)

    def send(self, frame: Frame) -> None:
        """Send or retain a frame; see `FrameLink.send`."""
        on_released, payload = None, frame.payload
        is_small = type(payload) is bytes and len(payload) < SHARED_FROM_BYTES
        if not is_small and (copied := self._copied(frame)) is not None:
            on_released, frame = frame.on_released, copied
        if self.is_broken or self.session.retained_bytes > self._limits.max_retained_bytes:
            self._wait_for_room()
        self._queue.send(frame)
        if on_released is not None:
            on_released()

    def send_with_next(self, frame: Frame) -> None:
        """Queue a frame without payload; see `FrameLink.send_with_next`."""
        self._wait_for_room()
        self._queue.send_with_next(frame)

    def close(self) -> None:
        """End the connection; see `FrameLink.close`."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            stream, kept = self._stream, self.session.end()
            self._changed.notify_all()
        self._queue.say_last(_LAST)
        stream.shut_down()
        _release(kept)

    # Recovery.

    def is_over(self, broken: Stream, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; return whether `broken` was replaced, or the connection closed."""
        with self._lock:
            return self._changed.wait_for(lambda: self.is_closed or self._stream is not broken, timeout_s)

    def abandon_stream(self, deadline: Deadline) -> bool:
        """Break the stream, and wait until it is read no longer; return whether the connection may be resumed.

        raises  DeadlineExceeded
        """
        with self._lock:
            if not self.is_broken:
                self._stream.shut_down()
            if not self._changed.wait_for(lambda: self.is_closed or self.is_broken, deadline.left_s):
                raise DeadlineExceeded(f"{self._name} is back, but its last stream is still being read")
            return not self.is_closed

    def resume(self, stream: Stream, peer_received: int) -> str:
        """Continue over `stream`; return why that is impossible, or "" on success.

        peer_received  number of frames that the other side has received
        """
        with self._lock:
            try:
                released = self.session.resume(peer_received)
            except WireError as error:
                stream.close()
                return str(error)
            self._stream = stream
            self.is_broken = False
            self._changed.notify_all()
            is_closed = self.is_closed
        _release(released)  # without the lock: it calls code of the senders
        if is_closed:
            stream.shut_down()
        self._queue.resume(stream, self._again)
        self._read_from(stream)
        return ""

    # Sending.

    def _pack(self, frames: Sequence[Frame]) -> Parts:
        """Number, retain and serialise frames that are about to be sent.

        After `close`, only frames that hold copies are still sent: the caller may already use the memory of others.
        """
        every: Parts = []
        unsent: list[OnReleased] = []
        session = self.session
        with self._lock:
            for frame in frames:
                if frame.on_released is not None and self.is_closed:
                    unsent.append(frame.on_released)
                    continue
                meta, payload = frame.meta, frame.payload
                size_bytes, sequence = len(meta) + len(payload), 0
                parts: Parts = []
                if frame.kind <= Kind.NOTIFY:
                    sequence = session.send(parts, size_bytes, frame.on_released)
                else:
                    session.say_received()
                header = pack_header(frame, sequence, session.received)
                if size_bytes > _JOINED_BYTES:
                    parts += map(memoryview, (header, meta, *parts_of(payload)))
                else:
                    assert isinstance(payload, bytes)  # copied by `send`
                    parts.append(memoryview(header + meta + payload))
                every += parts
        for on_released in unsent:
            on_released()
        return every

    def _copied(self, frame: Frame) -> Frame | None:
        """Return the frame with its payload copied, so that the original can be released; None to send it uncopied."""
        size_bytes = len(frame.payload)
        if size_bytes >= SHARED_FROM_BYTES and self._pool is not None:
            location = self._pool.put(frame.payload)
            if location is not None:
                return msgspec.structs.replace(frame, payload=location, on_released=None, is_shared=True)
        if size_bytes <= COPIED_BYTES and type(frame.payload) is not bytes:
            return msgspec.structs.replace(frame, payload=bytes(joined(frame.payload)), on_released=None)
        return None

    def _wait_for_room(self) -> None:
        """Wait, unless on a reader thread, until few enough bytes are unacknowledged.

        raises  TransportClosed on a time-out, or if too many frames wait for a new stream
        """
        session, limits = self.session, self._limits
        if self.is_broken and (frames := len(session.retained)) >= limits.max_unsent:
            raise TransportClosed(f"the other side cannot be reached, and {frames} frames wait")
        if session.retained_bytes <= limits.max_retained_bytes or on_reader_thread():
            return
        with self._lock:
            self._waiting_for_room += 1
            try:
                has_room = self._changed.wait_for(
                    lambda: self.is_closed or session.retained_bytes <= limits.max_retained_bytes,
                    limits.stall_timeout_s,
                )
            finally:
                self._waiting_for_room -= 1
        if not has_room:
            raise TransportClosed(
                f"the other side took nothing of {session.retained_bytes} bytes for {limits.stall_timeout_s:g} s"
            )

    def _again(self) -> list[Parts]:
        with self._lock:
            return [kept.item for kept in self.session.retained]

    # Reading.

    def _read_available(self) -> bool:
        """Handle the frames that have arrived; return whether the data ends in the middle of a frame."""
        breaks = False
        try:
            ended = self._read()
        except WireError as error:
            ended = f"the other side broke the protocol: {error}"
            LOGGER.warning("connection to %s closed: %s", self._name, ended)
        except MemoryError as error:
            ended = f"there is no memory for a frame: {error}"
        except OSError as error:
            ended, breaks = reason_of(error), True
        except Exception:
            LOGGER.exception("reading the connection to %s failed", self._name)
            ended = "reading failed"
        flush()
        if ended:
            self._stream_ended(ended, breaks=breaks)
        return not ended and self._reader.is_in_frame

    def _stalled(self) -> None:
        self._stream_ended(str(stalled(self._limits)), breaks=True)

    def _read_from(self, stream: Stream) -> None:
        self._reader = FrameReader(stream, self._limits, self._view)
        self._reactor.add(stream.file, self._read_available, self._stalled)

    def _read(self) -> str:
        """Handle the frames that have arrived; return why the other side closed the connection, or "".

        raises  OSError, such as TransportClosed, if the stream broke; WireError; MemoryError
        """
        reader = self._reader
        while True:
            try:
                if not reader.receive():
                    raise TransportClosed(_CLOSED)
            except BlockingIOError:
                return ""
            while reader.is_in_frame and (frame := reader.read()) is not None:
                if frame.kind is Kind.LAST:
                    return _CLOSED
                self._take(frame)
            if not self._stream.may_hold_back:
                return ""

    def _take(self, frame: Frame) -> None:
        is_message = frame.kind <= Kind.NOTIFY
        if is_message and not frame.sequence:
            raise WireError("a message has no number")
        session = self.session
        with self._lock:
            kept = session.acknowledge(frame.acknowledged)
            is_new = is_message and session.receive(frame.sequence, len(frame.payload) + len(frame.meta))
            if kept and self._waiting_for_room:
                self._changed.notify_all()
        if any(map(_ON_RELEASED, kept)):
            _release(kept)
        if is_new:
            self._on_frame(frame)
            if session.ack_due:
                self._queue.send(_ACK)

    def _stream_ended(self, reason: str, *, breaks: bool) -> None:
        """Start a thread that recovers the connection, or end it."""
        stream = self._stream
        self._reactor.remove(stream.file)
        stream.shut_down()
        self._queue.close_stream(stream)
        with self._lock:
            self.is_broken = True
            recovers = breaks and not self.is_closed
            self._changed.notify_all()
        if recovers:
            LOGGER.info("connection to %s broke and is resumed: %s", self._name, reason)
            name = f"dflow recover {self._name}"
            try:
                threading.Thread(target=self._recover_from, args=(stream, reason), name=name, daemon=True).start()
                return
            except RuntimeError as error:
                reason = f"{reason}, and {error}"
        self._on_end(reason)
        flush()

    def _recover_from(self, broken: Stream, reason: str) -> None:
        become_reader()
        try:
            reason = self._recover(self, broken, reason)
        except Exception:
            LOGGER.exception("resuming the connection to %s failed", self._name)
            reason = "resuming failed"
        if reason:
            self._on_end(reason)


def _release(kept: Iterable[Retained[Parts]]) -> None:
    for one in kept:
        if one.on_released is not None:
            one.on_released()
