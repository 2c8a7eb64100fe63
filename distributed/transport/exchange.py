"""Requests, replies and notifications over any link that carries frames in order.

Why: all transports share this code; a transport only brings a frame to the other side.

Invariants: a request number is used once in the life of a connection. A pending call is in `_waiting` until its reply
arrives, its wait ends, or the connection ends, whichever comes first. `_ended` is set once, under the lock; the thread
that sets it fails the pending calls and calls the handler's `on_close`.
"""

from __future__ import annotations

import enum
import logging
import threading
import traceback
from typing import Any, Generic, Protocol, cast

import msgspec

from dflow.distributed.transport.base import Handler, Limits, OnReleased, OnReply, Reply
from dflow.distributed.wire.codec import Payload, decode_message, encode_message
from dflow.distributed.wire.failures import error_of, failure_of
from dflow.distributed.wire.large_message import unpack
from dflow.distributed.wire.messages.connection import Failure
from dflow.distributed.wire.messages.message import Answer, Message, Request
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DeadlineExceeded, InternalError, TransportClosed, WireError

LOGGER = logging.getLogger("dflow")


class Kind(enum.IntEnum):
    """The kind of a frame: the first three are for exchanges, the others for links."""

    REQUEST = 1
    REPLY = 2
    NOTIFY = 3
    ACK = 4
    LAST = 5


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One message. `number` ties a reply to its request, and is 0 for a notification.

    `is_shared` is true only on the wire, where the payload is then a location in shared memory.
    """

    kind: Kind
    number: int
    meta: bytes | bytearray
    payload: Payload
    on_released: OnReleased | None = None
    is_shared: bool = False


class FrameLink(Protocol):
    """Carries frames to the other side, in order."""

    def send(self, frame: Frame) -> None:
        """Send a frame, or queue it on a reader thread; call `frame.on_released` once, unless this raises.

        raises  TransportClosed with the reason as its text
        """
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


class Exchange:
    """One end of a connection: a `Peer` to its users, driven by the link's reader thread."""

    def __init__(self, link: FrameLink, *, local: str, remote: str, handler: Handler, limits: Limits) -> None:
        self._link = link
        self._local = local
        self._remote = remote
        self._handler = handler
        self._limits = limits
        self._lock = threading.Lock()
        self._waiting: dict[int, _Pending[Any]] = {}
        self._last_number = 0
        self._ended: str | None = None

    @property
    def name(self) -> str:
        """The name that the other end gave."""
        return self._remote

    @property
    def closed(self) -> str:
        """Why the connection ended; empty while it is open."""
        return self._ended or ""

    def start(
        self, message: Request[Answer], payload: Payload = b"", on_reply: OnReply[Answer] | None = None
    ) -> _Pending[Answer]:
        """Send a request; see `base.Peer.start`."""
        meta = self._meta(message, payload)
        with self._lock:
            self._raise_if_ended()
            self._last_number += 1
            number = self._last_number
            pending = self._waiting[number] = _Pending(self, number, type(message), on_reply)
        try:
            self._send(Frame(Kind.REQUEST, number, meta, payload))
        except BaseException:
            self._forget(number)
            raise
        return pending

    def call(self, message: Request[Answer], payload: Payload = b"", *, timeout_s: float) -> Reply[Answer]:
        """Send a request and wait for its reply; see `base.Peer.call`."""
        _refuse_on_reader(type(message), self._remote)
        return self.start(message, payload).wait(timeout_s)

    def notify(self, message: Message, payload: Payload = b"", on_released: OnReleased | None = None) -> None:
        """Send a message that has no reply; see `base.Peer.notify`."""
        meta = self._meta(message, payload)
        self._raise_if_ended()
        self._send(Frame(Kind.NOTIFY, 0, meta, payload, on_released))

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection, and fail its pending calls with `reason`."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            waiting = list(self._waiting.values())
            self._waiting.clear()
        self._link.close()
        for pending in waiting:
            pending.resolve(TransportClosed(self._closed_text(reason, pending.asked.__name__)))
        try:
            self._handler.on_close(self, reason)
        except Exception:
            LOGGER.exception("%s: on_close of the connection to %s failed", self._local, self._remote)

    def arrived(self, frame: Frame) -> None:
        """Handle a frame from the other side; called on the reader thread only.

        raises  WireError if the frame breaks the protocol; the link must then close the connection
        """
        message = decode_message(frame.meta)
        payload = frame.payload if isinstance(frame.payload, memoryview) else memoryview(frame.payload)
        if frame.kind is Kind.REPLY:
            self._settle(frame.number, message, payload)
        elif self._ended is not None:
            return
        elif frame.kind is Kind.REQUEST:
            self._answer(frame.number, message, payload)
        else:
            self._take_notice(message, payload)

    def _settle(self, number: int, message: Message, payload: memoryview) -> None:
        pending = self._forget(number)
        if pending is None:
            LOGGER.debug("%s: %s answered request %d, which no one awaits", self._local, self._remote, number)
        else:
            pending.resolve(_outcome(pending.asked, message, payload, self._remote))

    def _answer(self, number: int, message: Message, payload: memoryview) -> None:
        responder = _Responder(self, number, type(message).__name__)
        try:
            self._handler.on_call(self, message, payload, responder)
        except Exception as error:
            LOGGER.info("%s: %s from %s failed: %s", self._local, type(message).__name__, self._remote, error)
            if not responder.fail_if_open(error):
                LOGGER.error("%s: a handler failed after it had answered\n%s", self._local, traceback.format_exc())

    def _take_notice(self, message: Message, payload: memoryview) -> None:
        try:
            self._handler.on_notify(self, message, payload)
        except Exception:
            LOGGER.exception("%s: %s from %s failed", self._local, type(message).__name__, self._remote)

    def send_reply(self, number: int, message: Message, payload: Payload) -> None:
        """Send the answer to request `number`; drops it if the connection has ended.

        raises  WireError if the answer exceeds this side's limits; then nothing is sent
        """
        meta = self._meta(message, payload)
        try:
            self._link.send(Frame(Kind.REPLY, number, meta, payload))
        except TransportClosed as error:
            LOGGER.debug("%s: the answer to %s is dropped: %s", self._local, self._remote, error)
            self.close(str(error))

    def _send(self, frame: Frame) -> None:
        try:
            self._link.send(frame)
        except TransportClosed as error:
            self.close(str(error))
            raise TransportClosed(self._closed_text(self.closed)) from error

    def _meta(self, message: Message, payload: Payload) -> bytes:
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

    def _forget(self, number: int) -> _Pending[Any] | None:
        with self._lock:
            return self._waiting.pop(number, None)

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise TransportClosed(self._closed_text(self._ended))

    def _closed_text(self, reason: str, asked: str = "") -> str:
        during = f" while it was asked for {asked}" if asked else ""
        return f"the connection from {self._local} to {self._remote} has ended{during}: {reason}"

    def give_up(self, number: int, asked: type[Message], timeout_s: float) -> DeadlineExceeded:
        """Abandon request `number`, and return the error to raise."""
        self._forget(number)
        return DeadlineExceeded(
            f"{self._remote} did not answer {asked.__name__} of {self._local} within {timeout_s:g} s"
        )


class _Pending(Generic[Answer]):
    """A request that may be unanswered; see `base.PendingReply`.

    `_unresolved` is a lock held until there is an outcome: cheaper than a future, and each call makes one.
    """

    __slots__ = ("_exchange", "_number", "_on_reply", "_outcome", "_unresolved", "asked")

    def __init__(
        self, exchange: Exchange, number: int, asked: type[Request[Answer]], on_reply: OnReply[Answer] | None
    ) -> None:
        self._exchange = exchange
        self._number = number
        self.asked = asked
        self._outcome: Outcome[Reply[Answer]] | None = None
        self._on_reply = on_reply
        self._unresolved = threading.Lock()
        self._unresolved.acquire()

    def resolve(self, outcome: Outcome[Reply[Answer]]) -> None:
        """Set the outcome, wake the waiter and call `on_reply`; called once, after removal from `_waiting`."""
        self._outcome = outcome
        self._unresolved.release()
        if self._on_reply is not None:
            try:
                self._on_reply(outcome)
            except Exception:
                LOGGER.exception("what was to be done with the answer of %s failed", self._exchange.name)

    def wait(self, timeout_s: float) -> Reply[Answer]:
        """Wait for the reply; see `base.PendingReply.wait`."""
        if self._outcome is None:
            _refuse_on_reader(self.asked, self._exchange.name)
            if not self._unresolved.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
                raise self._exchange.give_up(self._number, self.asked, timeout_s)
            self._unresolved.release()
        outcome = self._outcome
        if isinstance(outcome, Reply):
            return outcome
        assert outcome is not None
        raise outcome


def _outcome(asked: type[Request[Answer]], message: Message, payload: memoryview, peer: str) -> Outcome[Reply[Answer]]:
    """Return the reply to a request, unpacked, or its error. This is the only check of a reply's type."""
    if isinstance(message, asked.replies):
        return Reply(cast(Answer, message), payload)
    try:
        unpacked = unpack(message, payload)
    except WireError as error:
        return error
    if isinstance(unpacked, Failure):
        return error_of(unpacked, peer)
    if isinstance(unpacked, asked.replies) or not asked.replies:
        return Reply(cast(Answer, unpacked), payload)
    expected = " or ".join(reply.__name__ for reply in asked.replies)
    return WireError(
        f"{peer} answered {asked.__name__} with {type(unpacked).__name__}; expected {expected}; "
        "install the same dflow on both"
    )


class _Responder:
    """Answers one request; see `base.Responder`."""

    def __init__(self, exchange: Exchange, number: int, asked: str) -> None:
        self._exchange = exchange
        self._number = number
        self._asked = asked
        self._open = threading.Lock()

    def reply(self, message: Message, payload: Payload = b"") -> None:
        """Answer the request; see `base.Responder.reply`."""
        if not self._open.acquire(blocking=False):
            raise InternalError(f"{self._asked} from {self._exchange.name} was answered twice")
        try:
            self._exchange.send_reply(self._number, message, payload)
        except WireError as error:
            self._exchange.send_reply(self._number, failure_of(error), b"")

    def fail(self, error: BaseException) -> None:
        """Answer the request with an error."""
        self.reply(failure_of(error))

    def fail_if_open(self, error: BaseException) -> bool:
        """Answer with an error unless the request was answered before; return whether this call answered it."""
        if self._open.locked():
            return False
        self.fail(error)
        return True


def _refuse_on_reader(asked: type[Message], peer: str) -> None:
    if on_reader_thread():
        raise InternalError(
            f"a handler waits for {peer} to answer {asked.__name__}; hand the work to another thread, since this one "
            "must go on reading"
        )
