"""What every transport brings to its peers: a link that carries frames in order, its limits, and its reader threads."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dflow.distributed.wire.codec import SentPayload

LOGGER = logging.getLogger("dflow")

#: Least size of received payloads that are aligned; XLA copies smaller ones faster than they could be aligned.
MIN_ALIGNED_BYTES = 16 << 10

#: Called when the transport no longer needs the memory of a payload. It must not wait.
OnReleased = Callable[[], None]


@dataclass(frozen=True)
class Limits:
    """Settings of a transport, most of them limits: a connection that exceeds one is refused or closed.

    `max_meta_bytes`     size of a message without its payload
    `max_payload_bytes`  size of a payload
    `max_connections`    concurrent peers of a listener; fewer if the process's limit of open files is lower
    `max_unauthenticated`      concurrent unauthenticated connections of a listener; a new one evicts the oldest
    `max_from_source`    unauthenticated connections from one IP address
    `max_hello_bytes`    size of a `Hello`
    `hello_timeout_s`    time from the connection to the end of the peer's `Hello`
    `stall_timeout_s`    time without a byte in the middle of a frame, and without room to send
    `max_unsent`         frames queued for a peer that does not read its replies, or cannot be reached
    `max_retained_bytes` bytes sent and not acknowledged, beyond which a sender waits
    `resume_s`           time to reconnect to a peer after its socket broke, before the connection ends
    `shared_bytes`       shared memory for large payloads to each peer on this machine, whose pages are allocated when
                         first used; 0 for none
    """

    max_meta_bytes: int = 1 << 20
    max_payload_bytes: int = 4 << 30
    max_connections: int = 1 << 14
    max_unauthenticated: int = 256
    max_from_source: int = 64
    max_hello_bytes: int = 4096
    hello_timeout_s: float = 10.0
    stall_timeout_s: float = 60.0
    max_unsent: int = 4096
    max_retained_bytes: int = 64 << 20
    resume_s: float = 5.0
    shared_bytes: int = 1 << 30


class Kind(enum.IntEnum):
    """The kind of a frame: the first three are for peers, the others for links."""

    REQUEST = 1
    REPLY = 2
    NOTIFY = 3
    ACK = 4
    LAST = 5


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One message; `number` ties a reply to its request, and is 0 for a notification. Received, its payload is whole.

    is_shared     only on the wire: whether the payload is a location in shared memory
    sequence      of a received frame: its number in the session; 0 for frames that are not retained
    acknowledged  of a received frame: the sender has received all frames up to this number
    """

    kind: Kind
    number: int
    meta: bytes | bytearray
    payload: SentPayload
    on_released: OnReleased | None = None
    is_shared: bool = False
    sequence: int = 0
    acknowledged: int = 0


class FrameLink(Protocol):
    """Carries frames to the other side, in order."""

    def send(self, frame: Frame) -> None:
        """Send a frame, or queue it on a reader thread; call `frame.on_released` once, unless this raises.

        raises  TransportClosed with the reason as its text
        """
        ...

    def send_with_next(self, frame: Frame) -> None:
        """Send a small frame together with the next one; at the latest at a call of `flush`. Raises as `send`."""
        ...

    def flush(self) -> None:
        """Send the frames that wait for a next one."""
        ...

    def close(self) -> None:
        """End both directions and wake the reader; a second call does nothing."""
        ...


class _ReaderMark(threading.local):
    is_reader = False


_MARK = _ReaderMark()


def become_reader() -> None:
    """Mark this thread as a reader thread, which must never wait for a connection."""
    _MARK.is_reader = True


def on_reader_thread() -> bool:
    """Whether this thread is a reader thread."""
    return _MARK.is_reader
