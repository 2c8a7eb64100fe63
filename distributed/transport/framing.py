"""Frames over a stream.

Why no asyncio: a thread that receives straight into the final buffer was measured faster on loopback, in latency and
throughput. Small frames are read through a buffer, several by one system call and without waiting. A larger frame is
read to its end, waiting for the bytes.

A frame is a header, then the message (`meta`), then the payload. The header is 44 bytes, little-endian:

    0   4 bytes   magic `DFLW`
    4   u8        kind, a number of `link.Kind`
    5   u8        1 if the payload is a location in shared memory, else 0
    6   2 bytes   zero
    8   u32       meta size in bytes
    12  u64       request number
    20  u64       payload size in bytes
    28  u64       number of the frame in its session; zero for `Hello` and for frames that are not retained
    36  u64       acknowledgement: the sender has received all frames up to this number

There is no checksum: TCP has one, and TLS detects every changed byte.

Invariants: sizes are checked against the limits before anything is allocated for them. A payload's pages are touched
only as its bytes arrive. The stream counts as broken if no byte of a begun frame arrives for `stall_timeout_s`.
"""

from __future__ import annotations

import struct

from dflow.distributed.transport.buffer_pool import RECEIVED
from dflow.distributed.transport.link import MIN_ALIGNED_BYTES, Frame, Kind, Limits
from dflow.distributed.transport.reactor import give_way
from dflow.distributed.transport.shared_memory import LOCATION_BYTES, SharedView
from dflow.distributed.transport.stream import Deadline, Stream, receive_by
from dflow.distributed.wire.codec import Payload
from dflow.tracing.errors import TransportClosed, WireError

MAGIC = b"DFLW"
HEADER = struct.Struct("<4sBBHIQQQQ")

_BUFFER_BYTES = 1 << 16
_BREAKS_OFF = "the other side closed the connection in the middle of a frame"
_NO_HELLO = "the other side closed the connection before its Hello"
_KINDS = {kind.value: kind for kind in Kind}


#: A parsed header: kind, whether the payload is in shared memory, request number, sizes of meta and payload in bytes,
#: number in the session, and acknowledgement. A plain tuple, which is made faster than a class.
Header = tuple[Kind, bool, int, int, int, int, int]


def pack_header(frame: Frame, sequence: int = 0, acknowledged: int = 0) -> bytes:
    """Return the header of `frame`, with this number in the session, and this acknowledgement."""
    meta_bytes, payload_bytes = len(frame.meta), len(frame.payload)
    return HEADER.pack(
        MAGIC, frame.kind, frame.is_shared, 0, meta_bytes, frame.number, payload_bytes, sequence, acknowledged
    )


def parse_header(data: bytes | bytearray | memoryview, start: int, limits: Limits) -> Header:
    """Parse the header at `start`; raises WireError if it is malformed, or its sizes exceed the limits."""
    magic, kind, shared, pad, meta_bytes, number, payload_bytes, sequence, acknowledged = HEADER.unpack_from(
        data, start
    )
    if magic != MAGIC:
        raise WireError(f"a frame starts with {magic!r} instead of {MAGIC!r}; the other side does not speak dflow")
    known = _KINDS.get(kind)
    if known is None or pad or shared > 1:
        raise WireError(f"a frame header of unknown form: kind {kind}, flags {shared}, padding {pad:04x}")
    if meta_bytes > limits.max_meta_bytes:
        raise WireError(f"a message of {meta_bytes} bytes is over the limit of {limits.max_meta_bytes}")
    if payload_bytes > limits.max_payload_bytes:
        raise WireError(f"a payload of {payload_bytes} bytes is over the limit of {limits.max_payload_bytes}")
    return known, shared == 1, number, meta_bytes, payload_bytes, sequence, acknowledged


class FrameReader:
    """Reads frames from a stream whose time-out is `limits.stall_timeout_s`."""

    def __init__(self, stream: Stream, limits: Limits, shared: SharedView | None = None) -> None:
        self._stream = stream
        self._shared = shared
        self._limits = limits
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = 0
        self._end = 0
        self._header: Header | None = None
        #: Whether a frame, or a part of one, has arrived and is not read.
        self.is_in_frame = False

    def receive(self) -> bool:
        """Read the available bytes into the free part of the buffer; False if the other side closed the connection.

        raises  BlockingIOError if there are none; TransportClosed if the stream ends within a frame; OSError
        """
        held = self._end - self._start
        if self._start:
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        count = self._stream.receive(self._buffer[held:], waits=False)
        if count:
            self._end += count
            self.is_in_frame = True
        elif self.is_in_frame:
            raise TransportClosed(_BREAKS_OFF)
        return count > 0

    def read(self) -> Frame | None:
        """Return the next frame; None if the rest has not arrived, unless the buffer is too small for it: then wait.

        raises  WireError for a malformed header, or an invalid location in shared memory; TransportClosed if the stream
                ends or stalls within the frame; OSError
        """
        header, self._header = self._header, None
        if header is None:
            if self._end - self._start < HEADER.size:
                return None
            header = parse_header(self._buffer, self._start, self._limits)
            self._start += HEADER.size
        kind, is_shared, number, meta_bytes, payload_bytes, sequence, acknowledged = header
        middle = self._start + meta_bytes
        end = middle + payload_bytes
        meta: bytes | bytearray
        payload: memoryview | bytearray
        if end <= self._end and payload_bytes < MIN_ALIGNED_BYTES:
            # The common case, without further calls.
            meta, payload = self._buffer[self._start : middle].tobytes(), bytearray(self._buffer[middle:end])
            self._start = end
        else:
            if end > self._end:
                if meta_bytes + payload_bytes <= _BUFFER_BYTES:
                    self._header = header
                    return None
                give_way()
            meta = self._take(meta_bytes)
            if payload_bytes < MIN_ALIGNED_BYTES:
                payload = self._take(payload_bytes)
            else:
                payload = RECEIVED.take(payload_bytes)
                self._fill(payload)
        if is_shared:
            payload = self._shared_payload(payload)
        self.is_in_frame = self._start < self._end
        return Frame(kind, number, meta, payload, None, False, sequence, acknowledged)

    def _shared_payload(self, location: Payload) -> memoryview:
        if self._shared is None or len(location) != LOCATION_BYTES:
            raise WireError(f"a payload of {len(location)} bytes is marked as shared memory, but is no location there")
        return self._shared.take(location, self._limits.max_payload_bytes)

    def _take(self, size_bytes: int) -> bytearray:
        """Return a copy of the next `size_bytes` bytes, waiting for them."""
        start, end = self._start, self._start + size_bytes
        if end <= self._end:
            self._start = end
            return bytearray(self._buffer[start:end])
        data = bytearray(size_bytes)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        """Move the next bytes into `view`, waiting for them."""
        filled = min(self._end - self._start, len(view))
        view[:filled] = self._buffer[self._start : self._start + filled]
        self._start += filled
        while filled < len(view):
            try:
                count = self._stream.receive(view[filled:])
            except BlockingIOError:
                raise stalled(self._limits) from None
            if not count:
                raise TransportClosed(_BREAKS_OFF)
            filled += count


def stalled(limits: Limits) -> TransportClosed:
    """Return the error for a stream on which a begun frame got no more bytes in time."""
    return TransportClosed(f"a frame was begun but went on for {limits.stall_timeout_s:g} s without a byte")


def read_first(stream: Stream, limits: Limits, deadline: Deadline) -> bytearray:
    """Return the message of a connection's first frame, which has no payload.

    This changes the time-out of `stream`, and reads no byte behind the frame.

    raises  WireError; DeadlineExceeded if the frame is incomplete at `deadline`; TransportClosed if the connection ends
            first; OSError
    """

    def receive(size_bytes: int) -> bytearray:
        return receive_by(stream, size_bytes, deadline, late=late, closed=_NO_HELLO)

    late = f"no whole Hello came within {deadline.timeout_s:g} s"
    start = receive(len(MAGIC))
    if start == MAGIC:
        start += receive(HEADER.size - len(MAGIC))
    limits = Limits(max_meta_bytes=limits.max_hello_bytes, max_payload_bytes=0)
    _, _, _, meta_bytes, *_ = parse_header(start.ljust(HEADER.size, b"\0"), 0, limits)
    return receive(meta_bytes)
