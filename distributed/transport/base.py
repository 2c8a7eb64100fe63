"""The interface and guarantees of every transport, so that tasks and tests run the same on each.

Invariants of all transports:

- Messages sent by one thread over one connection arrive in the order they were sent.
- Each request gets at most one reply, and the reply reaches the call that sent the request.
- A connection ends once: every call waiting on it then raises `TransportClosed`, `Handler.on_close` is called
  once, and nothing more is delivered from it.
- A handler is called from the connection's reader thread, one message at a time. It must not wait there: it answers
  immediately, or keeps the `Responder` and answers later from any thread. Waiting for a reply on a reader thread is
  refused, since the reply might be behind the message being handled. Sending on a reader thread never blocks.
- An exception raised by a handler answers that one message; the connection goes on.
- A received payload belongs to the receiver. It is writable; payloads of at least `MIN_ALIGNED_BYTES` are aligned to
  `codec.ALIGNMENT_BYTES`.
- The sender must not change a payload after sending it, or with `on_released`, not before that is called.
- The other side handles each sent message once, in order, or the connection ends. A socket that breaks is replaced if
  both processes live and reach each other within `Limits.resume_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol

from dflow.distributed.wire.codec import Payload
from dflow.distributed.wire.messages.message import Answer, Message, Request
from dflow.lowering.values.outcome import Outcome


class Reply(NamedTuple, Generic[Answer]):
    """A message that answers a call, and its payload."""

    message: Answer
    payload: memoryview


#: Least size of received payloads that are aligned; XLA copies smaller ones faster than they could be aligned.
MIN_ALIGNED_BYTES = 16 << 10

#: Called when the transport no longer needs the memory of a payload. It must not wait.
OnReleased = Callable[[], None]

#: Called with the reply, or with the error that `PendingReply.wait` would raise.
OnReply = Callable[[Outcome[Reply[Answer]]], None]


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


class PendingReply(Protocol[Answer]):
    """A request that was sent and may be unanswered."""

    def wait(self, timeout_s: float) -> Reply[Answer]:
        """Wait for the reply and return it.

        raises  the peer's error if it answered with a `Failure`, as the exception class that the failure names;
                WireError for a reply that the request does not declare; TransportClosed if the connection ends first;
                DeadlineExceeded after `timeout_s`, when a later reply is dropped
        """
        ...


class Peer(Protocol):
    """The other end of a connection."""

    @property
    def name(self) -> str:
        """The name that the other end gave in its `Hello`."""
        ...

    @property
    def closed(self) -> str:
        """Why the connection ended; empty while it is open."""
        ...

    def start(
        self, message: Request[Answer], payload: Payload = b"", on_reply: OnReply[Answer] | None = None
    ) -> PendingReply[Answer]:
        """Send a request and return without waiting for its reply.

        on_reply  called once, from any thread, before the handling of any message after the reply. It must not wait
        raises    TransportClosed, with which `on_reply` may be called too; WireError if message or payload exceeds this
                  side's limits
        """
        ...

    def call(self, message: Request[Answer], payload: Payload = b"", *, timeout_s: float) -> Reply[Answer]:
        """Send a request and wait for its reply; raises what `start` and `PendingReply.wait` raise."""
        ...

    def notify(self, message: Message, payload: Payload = b"", on_released: OnReleased | None = None) -> None:
        """Send a message that has no reply; raises what `start` raises.

        on_released  called once when the memory of `payload` is no longer needed here, from any thread, maybe before
                     this returns; not called if this raises
        """
        ...

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection; a second call does nothing."""
        ...


class Responder(Protocol):
    """Answers one call, once, from any thread; an answer to a closed connection is dropped."""

    def reply(self, message: Message, payload: Payload = b"") -> None:
        """Answer the call; raises InternalError if it was answered before."""
        ...

    def fail(self, error: BaseException) -> None:
        """Answer the call with an error; raises InternalError if it was answered before."""
        ...


class Handler(Protocol):
    """Handles the messages of one side's connections; called on reader threads, and must not wait."""

    def on_call(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        """Handle a request, and answer by `responder` now or later; an exception answers with a `Failure`."""
        ...

    def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
        """Handle a message that has no reply; an exception is logged."""
        ...

    def on_close(self, peer: Peer, reason: str) -> None:
        """React to the end of a connection, by either side."""
        ...


class Listener(Protocol):
    """An address that accepts connections."""

    @property
    def address(self) -> str:
        """The address to connect to, with the real port."""
        ...

    def close(self) -> None:
        """Stop listening and end every connection made here; a second call does nothing."""
        ...


def always_wanted() -> bool:
    """Return True: retry a connection until its deadline."""
    return True


class Transport(Protocol):
    """Connects tasks: it listens at addresses, and dials them."""

    def listen(self, address: str, *, name: str, handler: Handler) -> Listener:
        """Accept connections at `address` as `name`.

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
        """Connect as `name`, retrying until the deadline; errors call the other side `who`.

        `is_wanted`  called between attempts; when it returns False, raise the last attempt's error without a retry
        raises       SecurityError if the address may not be used; WireError if the other side speaks another protocol;
                     DeadlineExceeded naming `who`, the address and the time
        """
        ...


class RefuseAll:
    """The handler of a side that only sends requests: it refuses requests and ignores all other messages."""

    def on_call(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        """Raise NotImplementedError, which is sent to the caller."""
        raise NotImplementedError(f"{type(message).__name__} is not answered here")

    def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
        """Do nothing."""

    def on_close(self, peer: Peer, reason: str) -> None:
        """Do nothing."""
