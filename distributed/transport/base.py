"""What every transport promises, so that tasks and tests do not care which one they run on.

Invariants, kept by both transports:

- Messages sent by one thread over one connection arrive in the order they were sent.
- Each request gets at most one reply, and the reply reaches the call that sent the request.
- A connection ends once: every call waiting on it then raises `TransportClosed`, `Handler.on_close` is called
  once, and nothing more is delivered from it.
- A handler is called from the connection's reader thread, one message at a time. It must not wait there: it answers
  at once, or keeps the `Responder` and answers later from any thread. Waiting for a reply on a reader thread is
  refused, since the reply might be behind the message being handled. Sending from it never blocks.
- An exception out of a handler is the answer to that one message; the connection goes on.
- A received payload is the receiver's own: writable, and aligned to `codec.ALIGNMENT_BYTES` from `MIN_ALIGNED_BYTES`
  on.
- Whoever sends a payload leaves it unchanged from then on; with `on_released`, until that is called.
- A message that was handed over is handled once by the other side, in order, or the connection ends: a socket that
  breaks is replaced while both processes live and can reach each other within `Limits.resume_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dflow.distributed.codec import Payload
from dflow.distributed.messages import AnyMessage


class Reply(NamedTuple):
    """A message that answers a call, and its payload."""

    message: AnyMessage
    payload: memoryview


#: Received payloads of at least so many bytes are aligned; XLA copies smaller ones faster than they are aligned.
MIN_ALIGNED_BYTES = 16 << 10

#: Told that the transport needs the memory of a payload no longer. It must not wait.
OnReleased = Callable[[], None]

#: Takes a reply, or the error that a `PendingReply.wait` would raise.
OnReply = Callable[[Reply | BaseException], None]


@dataclass(frozen=True)
class Limits:
    """What a transport takes from a peer before it closes the connection.

    `max_meta_bytes`     size of a message without its payload
    `max_payload_bytes`  size of a payload
    `max_connections`    peers of a listener at a time; fewer if the process's limit of open files is lower
    `max_strangers`      unauthenticated connections of a listener; the oldest gives way to a newcomer
    `max_from_source`    of these, how many from one IP address
    `max_hello_bytes`    size of a `Hello`
    `hello_timeout_s`    time from the connection to the end of the peer's `Hello`
    `stall_timeout_s`    time without a byte in the middle of a frame, and without room to send
    `max_unsent`         frames queued for a peer that does not read its replies, or cannot be reached
    `max_retained_bytes` bytes sent that the peer has not acknowledged, beyond which a sender waits
    `resume_s`           time to reach a peer again whose socket broke, before the connection ends
    `shared_bytes`       memory to each peer of this machine by which large payloads go, of which pages are taken when
                         used; 0 is none
    `checksums`          whether frames carry checksums (what is received is checked if it has one); a frame whose
                         bytes are not those sent is sent again over a new socket
    """

    max_meta_bytes: int = 1 << 20
    max_payload_bytes: int = 4 << 30
    max_connections: int = 1 << 14
    max_strangers: int = 256
    max_from_source: int = 64
    max_hello_bytes: int = 4096
    hello_timeout_s: float = 10.0
    stall_timeout_s: float = 60.0
    max_unsent: int = 4096
    max_retained_bytes: int = 64 << 20
    resume_s: float = 5.0
    shared_bytes: int = 1 << 30
    checksums: bool = False


class PendingReply(Protocol):
    """A request that was sent and may not be answered yet."""

    def wait(self, timeout_s: float) -> Reply:
        """The reply.

        raises  the peer's error if it answered with a `Failure`, as the class of that name;
                TransportClosed if the connection ends first; DeadlineExceeded after `timeout_s`, whereupon a late
                reply is dropped
        """
        ...

    def when_done(self, on_reply: OnReply) -> None:
        """Call `on_reply` once, from the reader thread (or now, when the reply is there). It must not wait."""
        ...


class Peer(Protocol):
    """The other end of a connection."""

    @property
    def name(self) -> str:
        """How the other end called itself in its `Hello`."""
        ...

    @property
    def closed(self) -> str:
        """Why the connection ended; empty while it is open."""
        ...

    def start(self, message: AnyMessage, payload: Payload = b"", on_reply: OnReply | None = None) -> PendingReply:
        """Send a request and return without waiting for its reply.

        on_reply  called as by `PendingReply.when_done`, but before anything is handled that comes after the reply
        raises    TransportClosed, which `on_reply` may be told too; WireError if message or payload is over this side's
                  limits
        """
        ...

    def call(self, message: AnyMessage, payload: Payload = b"", *, timeout_s: float) -> Reply:
        """Send a request and wait for its reply; raises what `start` and `PendingReply.wait` raise."""
        ...

    def notify(self, message: AnyMessage, payload: Payload = b"", on_released: OnReleased | None = None) -> None:
        """Send a message that has no reply; raises what `start` raises.

        on_released  called once when the memory of `payload` is no longer needed here, from any thread, maybe before
                     this returns; not called if this raises
        """
        ...

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection; a second call does nothing."""
        ...


class Responder(Protocol):
    """The way to answer one call, once, from any thread; answers to a peer that has gone are dropped."""

    def reply(self, message: AnyMessage, payload: Payload = b"") -> None:
        """Answer; raises InternalError if the call was answered before."""
        ...

    def fail(self, error: BaseException) -> None:
        """Answer that the request failed; raises InternalError if the call was answered before."""
        ...


class Handler(Protocol):
    """What one side does with the messages of its connections; called from reader threads, and must not wait."""

    def on_call(self, peer: Peer, message: AnyMessage, payload: memoryview, responder: Responder) -> None:
        """Carry out a request, answering by `responder` now or later; an exception answers with a `Failure`."""
        ...

    def on_notify(self, peer: Peer, message: AnyMessage, payload: memoryview) -> None:
        """Take a message that has no reply; an exception is logged."""
        ...

    def on_close(self, peer: Peer, reason: str) -> None:
        """The connection has ended, by either side."""
        ...


class Listener(Protocol):
    """A place where others connect."""

    @property
    def address(self) -> str:
        """The address to connect to, with the real port."""
        ...

    def close(self) -> None:
        """Stop listening and end every connection made here; a second call does nothing."""
        ...


def always_wanted() -> bool:
    """Yes: a connection is tried until its deadline."""
    return True


class Transport(Protocol):
    """A way to reach other tasks."""

    def listen(self, address: str, *, name: str, handler: Handler) -> Listener:
        """Take connections at `address` as `name`.

        raises  SecurityError if the address may not be used; OSError if it is taken
        """
        ...

    def connect(
        self,
        address: str,
        *,
        name: str,
        handler: Handler,
        who: str,
        timeout_s: float,
        is_wanted: Callable[[], bool] = always_wanted,
    ) -> Peer:
        """Connect as `name`, retrying until the deadline; `who` says in errors whom this should reach.

        `is_wanted`  asked between attempts; once it says no, the last attempt's error is raised without waiting longer
        raises       SecurityError if the address may not be used; WireError if the other side speaks another protocol;
                     DeadlineExceeded naming `who`, the address and the time
        """
        ...


class RefuseAll:
    """The handler of a side that only asks: refuses requests and passes over the rest."""

    def on_call(self, peer: Peer, message: AnyMessage, payload: memoryview, responder: Responder) -> None:
        """Raise NotImplementedError, which reaches the asker."""
        raise NotImplementedError(f"{type(message).__name__} is not answered here")

    def on_notify(self, peer: Peer, message: AnyMessage, payload: memoryview) -> None:
        """Do nothing."""

    def on_close(self, peer: Peer, reason: str) -> None:
        """Do nothing."""
