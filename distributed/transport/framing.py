"""Frames over a stream.

Why plain blocking calls: a reader thread that receives straight into the final buffer was measured faster than
asyncio on loopback, in latency and in rate.

A frame is a header, then the message (`meta`), then the payload. The header is 32 bytes, little-endian:

    0   4 bytes   magic `DFLW`
    4   u8        kind, a number of `exchange.Kind`
    5   3 bytes   zero
    8   u64       request number
    16  u64       payload size in bytes
    24  u32       meta size in bytes
    28  4 bytes   zero

Invariants: sizes are checked against the limits before anything is allocated for them; a payload's memory is used
only as its bytes arrive; a frame that is begun goes on at least every `stall_timeout_s`, or the connection ends.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

from dflow.distributed.codec import empty_payload
from dflow.distributed.transport.base import Limits
from dflow.distributed.transport.exchange import Frame, Kind
from dflow.distributed.transport.stream import Stream
from dflow.tracing.errors import DeadlineExceeded, TransportClosed, WireError

MAGIC = b"DFLW"
HEADER = struct.Struct("<4sB3sQQI4s")
_KINDS = {kind.value: kind for kind in Kind}


class Header(NamedTuple):
    """What a frame's header says of the rest."""

    kind: Kind
    number: int
    meta_bytes: int
    payload_bytes: int


def pack_header(frame: Frame) -> bytes:
    """The header of `frame`."""
    return HEADER.pack(MAGIC, frame.kind, bytes(3), frame.number, len(frame.payload), len(frame.meta), bytes(4))


def parse_header(data: bytes | bytearray, limits: Limits) -> Header:
    """Read a header; raises WireError if it is no header, or if its sizes are over the limits."""
    magic, kind, pad, number, payload_bytes, meta_bytes, tail = HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError(f"a frame starts with {magic!r} instead of {MAGIC!r}; the other side does not speak dflow")
    if kind not in _KINDS or any(pad) or any(tail):
        raise WireError(f"a frame header of unknown form: kind {kind}, padding {(pad + tail).hex()}")
    if meta_bytes > limits.max_meta_bytes:
        raise WireError(f"a message of {meta_bytes} bytes is over the limit of {limits.max_meta_bytes}")
    if payload_bytes > limits.max_payload_bytes:
        raise WireError(f"a payload of {payload_bytes} bytes is over the limit of {limits.max_payload_bytes}")
    return Header(_KINDS[kind], number, meta_bytes, payload_bytes)


class FrameReader:
    """Reads frames from a stream whose time-out is `limits.stall_timeout_s`."""

    def __init__(self, stream: Stream, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._header = bytearray(HEADER.size)

    def read(self) -> Frame | None:
        """The next frame, or None when the other side closed the connection between frames.

        raises  WireError if what comes is no frame; TransportClosed if the frame breaks off; OSError
        """
        if not self._fill(memoryview(self._header), may_end=True):
            return None
        header = parse_header(self._header, self._limits)
        meta = bytearray(header.meta_bytes)
        self._fill(memoryview(meta))
        payload = empty_payload(header.payload_bytes)
        self._fill(payload)
        return Frame(header.kind, header.number, meta, payload)

    def _fill(self, view: memoryview, *, may_end: bool = False) -> bool:
        """Fill `view`; with `may_end`, wait without limit for its first byte, and return False if none comes."""
        filled = 0
        while filled < len(view):
            try:
                count = self._stream.receive_into(view[filled:])
            except BlockingIOError:
                if may_end and filled == 0:
                    continue
                raise WireError(
                    f"a frame was begun but went on for {self._limits.stall_timeout_s:g} s without a byte"
                ) from None
            if count == 0:
                if may_end and filled == 0:
                    return False
                raise TransportClosed("the other side closed the connection in the middle of a frame")
            filled += count
        return True


class Deadline(NamedTuple):
    """A moment of the monotonic clock, and the time that was given until it, in s."""

    at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """The moment `timeout_s` from now."""
        return cls(time.monotonic() + timeout_s, timeout_s)

    @property
    def left_s(self) -> float:
        """The time until it; at least 1 ms."""
        return max(self.at - time.monotonic(), 0.001)


def read_first(stream: Stream, limits: Limits, deadline: Deadline) -> Frame:
    """The first frame of a connection, which has no payload, all of it before `deadline`.

    Leaves `stream` with a time-out of its own.

    raises  WireError; DeadlineExceeded; TransportClosed if the connection ends first; OSError
    """
    header = parse_header(_receive_by(stream, HEADER.size, deadline), limits)
    if header.payload_bytes:
        raise WireError(f"the first frame has a payload of {header.payload_bytes} bytes; a Hello has none")
    if header.meta_bytes > limits.max_hello_bytes:
        raise WireError(f"a first message of {header.meta_bytes} bytes is over the limit of {limits.max_hello_bytes}")
    meta = _receive_by(stream, header.meta_bytes, deadline)
    return Frame(header.kind, header.number, meta, b"")


def _receive_by(stream: Stream, size_bytes: int, deadline: Deadline) -> bytearray:
    data = bytearray(size_bytes)
    rest = memoryview(data)
    late = DeadlineExceeded(f"no whole Hello came within {deadline.timeout_s:g} s")
    while rest:
        if time.monotonic() >= deadline.at:
            raise late
        stream.set_timeout(deadline.left_s)
        try:
            count = stream.receive_into(rest)
        except BlockingIOError:
            raise late from None
        if not count:
            raise TransportClosed("the other side closed the connection before its Hello")
        rest = rest[count:]
    return data
