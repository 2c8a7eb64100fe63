"""The guarantees of every transport, and the peers that all transports share, so that tasks run the same on each.

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
  `ALIGNMENT_BYTES`.
- The sender must not change a payload after sending it, or with `on_released`, not before that is called.
- The other side handles each sent message once, in order, or the connection ends. A socket that breaks is replaced if
  both processes live and reach each other within `Limits.resume_s`, or the time that its owner gave.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol

from dflow.distributed.transport.link import LOGGER, Frame, FrameLink, Kind, Limits, OnReleased, on_reader_thread
from dflow.distributed.wire.codec import Parts, SentPayload, decode_message, encode_message
from dflow.distributed.wire.failures import error_of, failure_of
from dflow.distributed.wire.large_message import unpack
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.message import Answer, Message, Request
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DeadlineExceeded, InternalError, TransportClosed, WireError


class Reply(NamedTuple, Generic[Answer]):
    """A message that answers a call, and its payload."""

    message: Answer
    payload: memoryview


#: Called with the reply, or with the error that `PendingReply.wait` would raise.
OnReply = Callable[[Outcome[Reply[Answer]]], None]


class Handler:
    """Handles the messages of one side's connections; its methods are called on reader threads, and must not wait.

    This one is of a side that only sends requests: it refuses requests and ignores all other messages.
    """

    def on_call(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        """Handle a request, and answer by `responder` now or later; an exception answers with a `Failure`."""
        raise NotImplementedError(f"{type(message).__name__} is not answered here")

    def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
        """Handle a message that has no reply; an exception is logged."""

    def on_close(self, peer: Peer, reason: str) -> None:
        """React to the end of a connection, by either side."""


class Peer:
    """The other end of a connection, whose messages go to `handler`; `local` and `remote` are the names of both ends.

    Invariants: a request number is used once in the life of a connection. A pending call is in `_waiting` until its
    reply arrives, its wait ends, or the connection ends, whichever comes first. `closed` is set once, under the lock;
    the thread that sets it fails the pending calls and calls the handler's `on_close`.
    """

    def __init__(self, link: FrameLink, *, local: str, remote: str, handler: Handler, limits: Limits) -> None:
        #: The name that the other end gave in its `Hello`.
        self.name = remote
        #: Why the connection ended; empty while it is open.
        self.closed = ""
        self._link = link
        #: Send the messages that wait for a next one.
        self.flush = link.flush
        self._local = local
        self._handler = handler
        self._limits = limits
        self._lock = threading.Lock()
        self._waiting: dict[int, PendingReply[Any]] = {}
        self._last_number = 0

    def start(
        self,
        message: Request[Answer],
        payload: SentPayload = b"",
        on_reply: OnReply[Answer] | None = None,
        *,
        with_next: bool = False,
    ) -> PendingReply[Answer]:
        """Send a request and return without waiting for its reply.

        on_reply   called once, from any thread, before the handling of any message after the reply. It must not wait
        with_next  send the request, which has no payload, together with the next message, or at a call of `flush`
        raises     TransportClosed, with which `on_reply` may be called too; WireError if message or payload exceeds
                   this side's limits
        """
        meta = self._meta(message, payload)
        with self._lock:
            if self.closed:
                raise TransportClosed(self._closed_text())
            self._last_number += 1
            number = self._last_number
            pending = self._waiting[number] = PendingReply(self, number, type(message), on_reply)
        try:
            (self._link.send_with_next if with_next else self._link.send)(Frame(Kind.REQUEST, number, meta, payload))
        except TransportClosed as error:
            raise self._ended(error) from error
        except BaseException:
            self._forget(number)
            raise
        return pending

    def call(self, message: Request[Answer], payload: SentPayload = b"", *, timeout_s: float) -> Reply[Answer]:
        """Send a request and wait for its reply; raises what `start` and `PendingReply.wait` raise."""
        _refuse_on_reader(type(message), self.name)
        return self.start(message, payload).wait(timeout_s)

    def notify(self, message: Message, payload: SentPayload = b"", on_released: OnReleased | None = None) -> None:
        """Send a message that has no reply; raises what `start` raises.

        on_released  called once when the memory of `payload` is no longer needed here, from any thread, maybe before
                     this returns; not called if this raises
        """
        meta = self._meta(message, payload)
        if self.closed:
            raise TransportClosed(self._closed_text())
        try:
            self._link.send(Frame(Kind.NOTIFY, 0, meta, payload, on_released))
        except TransportClosed as error:
            raise self._ended(error) from error

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection, and fail its pending calls with `reason`; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = reason
            waiting = list(self._waiting.values())
            self._waiting.clear()
        self._link.close()
        for pending in waiting:
            pending.resolve(TransportClosed(self._closed_text(f" while it was asked for {pending.asked.__name__}")))
        try:
            self._handler.on_close(self, reason)
        except Exception:
            LOGGER.exception("%s: on_close of the connection to %s failed", self._local, self.name)

    def arrived(self, frame: Frame) -> None:
        """Handle a frame from the other side; called on the reader thread only.

        raises  WireError if the frame breaks the protocol; the link must then close the connection
        """
        message = decode_message(frame.meta)
        assert not isinstance(frame.payload, Parts)
        payload = memoryview(frame.payload)
        if frame.kind is Kind.REPLY:
            self._settle(frame.number, message, payload)
        elif self.closed:
            return
        elif frame.kind is Kind.REQUEST:
            self._answer(frame.number, message, payload)
        else:
            try:
                self._handler.on_notify(self, message, payload)
            except Exception:
                LOGGER.exception("%s: %s from %s failed", self._local, type(message).__name__, self.name)

    def _settle(self, number: int, message: Message, payload: memoryview) -> None:
        with self._lock:
            pending = self._waiting.pop(number, None)
        if pending is None:
            LOGGER.debug("%s: %s answered request %d, which no one awaits", self._local, self.name, number)
        else:
            pending.resolve(_outcome(pending.asked, message, payload, self.name))

    def _answer(self, number: int, message: Message, payload: memoryview) -> None:
        responder = Responder(self, number, type(message).__name__)
        try:
            self._handler.on_call(self, message, payload, responder)
        except Exception as error:
            LOGGER.info("%s: %s from %s failed: %s", self._local, type(message).__name__, self.name, error)
            try:
                responder.fail(error)
            except InternalError:
                LOGGER.error("%s: a handler failed after it had answered\n%s", self._local, traceback.format_exc())

    def send_reply(self, number: int, message: Message, payload: SentPayload) -> None:
        """Send the answer to request `number`; drops it if the connection has ended.

        raises  WireError if the answer exceeds this side's limits; then nothing is sent
        """
        meta = self._meta(message, payload)
        try:
            self._link.send(Frame(Kind.REPLY, number, meta, payload))
        except TransportClosed as error:
            LOGGER.debug("%s: the answer to %s is dropped: %s", self._local, self.name, error)
            self.close(str(error))

    def give_up(self, number: int, asked: type[Message], timeout_s: float) -> DeadlineExceeded:
        """Abandon request `number`, and return the error to raise."""
        self._forget(number)
        return DeadlineExceeded(f"{self.name} did not answer {asked.__name__} of {self._local} within {timeout_s:g} s")

    def _ended(self, error: TransportClosed) -> TransportClosed:
        """Close the connection, over which nothing can be sent, and fail its calls; return the error to raise."""
        self.close(str(error))
        return TransportClosed(self._closed_text())

    def _meta(self, message: Message, payload: SentPayload) -> bytes:
        meta = encode_message(message)
        what = type(message).__name__
        if len(meta) > self._limits.max_meta_bytes:
            raise WireError(
                f"{what} takes {len(meta)} bytes, over the limit of {self._limits.max_meta_bytes}; "
                "move the large part into the payload"
            )
        if len(payload) > self._limits.max_payload_bytes:
            raise WireError(
                f"the payload of {what} has {len(payload)} bytes, over the limit of "
                f"{self._limits.max_payload_bytes}; send it in parts, or raise the limit on both sides"
            )
        return meta

    def _forget(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)

    def _closed_text(self, during: str = "") -> str:
        return f"the connection from {self._local} to {self.name} has ended{during}: {self.closed}"


class PendingReply(Generic[Answer]):
    """A request that was sent and may be unanswered.

    `_unresolved` is a lock held until there is an outcome: cheaper than a future, and each call makes one.
    """

    __slots__ = ("_number", "_on_reply", "_outcome", "_peer", "_unresolved", "asked")

    def __init__(self, peer: Peer, number: int, asked: type[Request[Answer]], on_reply: OnReply[Answer] | None) -> None:
        self._peer = peer
        self._number = number
        self.asked = asked
        self._outcome: Outcome[Reply[Answer]] | None = None
        self._on_reply = on_reply
        self._unresolved = threading.Lock()
        self._unresolved.acquire()

    def resolve(self, outcome: Outcome[Reply[Answer]]) -> None:
        """Set the outcome, wake the waiter and call `on_reply`; called once, by the peer."""
        self._outcome = outcome
        self._unresolved.release()
        if self._on_reply is not None:
            try:
                self._on_reply(outcome)
            except Exception:
                LOGGER.exception("what was to be done with the answer of %s failed", self._peer.name)

    def wait(self, timeout_s: float) -> Reply[Answer]:
        """Wait for the reply and return it.

        raises  the peer's error if it answered with a `Failure`, as the exception class that the failure names;
                WireError for a reply that the request does not declare; TransportClosed if the connection ends first;
                DeadlineExceeded after `timeout_s`, when a later reply is dropped
        """
        if self._outcome is None:
            _refuse_on_reader(self.asked, self._peer.name)
            if not self._unresolved.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
                raise self._peer.give_up(self._number, self.asked, timeout_s)
            self._unresolved.release()
        outcome = self._outcome
        if isinstance(outcome, Reply):
            return outcome
        assert outcome is not None
        raise outcome


class Responder:
    """Answers one request, once, from any thread; an answer to a closed connection is dropped."""

    def __init__(self, peer: Peer, number: int, asked: str) -> None:
        self._peer = peer
        self._number = number
        self._asked = asked
        self._open = threading.Lock()

    def reply(self, message: Message, payload: SentPayload = b"") -> None:
        """Answer the request; raises InternalError if it was answered before."""
        if not self._open.acquire(blocking=False):
            raise InternalError(f"{self._asked} from {self._peer.name} was answered twice")
        try:
            self._peer.send_reply(self._number, message, payload)
        except WireError as error:
            self._peer.send_reply(self._number, failure_of(error), b"")

    def fail(self, error: BaseException) -> None:
        """Answer the request with an error; raises InternalError if it was answered before."""
        self.reply(failure_of(error))


def _outcome(asked: type[Request[Answer]], message: Message, payload: memoryview, peer: str) -> Outcome[Reply[Answer]]:
    """Return the reply to a request, unpacked, or its error. This is the only check of a reply's type."""
    if isinstance(message, asked.replies):
        return Reply(message, payload)  # type: ignore[arg-type]
    try:
        unpacked = unpack(message, payload)
    except WireError as error:
        return error
    if isinstance(unpacked, Failure):
        return error_of(unpacked, peer)
    if isinstance(unpacked, asked.replies) or not asked.replies:
        return Reply(unpacked, payload)  # type: ignore[arg-type]
    expected = " or ".join(reply.__name__ for reply in asked.replies)
    return WireError(
        f"{peer} answered {asked.__name__} with {type(unpacked).__name__}; expected {expected}; "
        "install the same dflow on both"
    )


def _refuse_on_reader(asked: type[Message], peer: str) -> None:
    if on_reader_thread():
        raise InternalError(
            f"a handler waits for {peer} to answer {asked.__name__}; hand the work to another thread, since this one "
            "must go on reading"
        )


class Listener(Protocol):
    """An address that accepts connections."""

    #: The address to connect to, with the real port.
    address: str

    def close(self) -> None:
        """Stop listening and end every connection made here; a second call does nothing."""
        ...


class Transport(Protocol):
    """Connects tasks: it listens at addresses, and dials them."""

    def listen(self, address: str, *, name: str, handler: Handler, resume_s: float | None = None) -> Listener:
        """Accept connections at `address` as `name`.

        `resume_s`  time to resume a broken connection, in place of that of the transport's limits
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
        is_wanted: Callable[[], bool] = lambda: True,
        resume_s: float | None = None,
    ) -> Peer:
        """Connect as `name`, retrying until the deadline; errors call the other side `who`.

        `is_wanted`  called between attempts; when it returns False, raise the last attempt's error without a retry
        `resume_s`   see `listen`
        raises       SecurityError if the address may not be used; WireError if the other side speaks another protocol;
                     DeadlineExceeded naming `who`, the address and the time
        """
        ...
