"""The driver of a client's session with the coordinator: it opens connections, and calls at the right time.

It decides nothing; `coordinator_session` decides what to do when the coordinator goes away and comes back. Its clock
and its transport are arguments, so that a simulator runs it too.

Invariants:
- every request has a deadline, and waits until then even while the coordinator is away;
- `roster` is the newest one that the coordinator sent, as soon as a Join is answered;
- callbacks get the rosters in order, one at a time, on any thread: they must not block, and must not call `ask`;
- `beat` is called every `heartbeat_s` while the joined task has a connection, whatever the program does.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from dflow.distributed.client.coordinator_session import (
    CoordinatorSession,
    EndLink,
    OpenLink,
    SendRequest,
    SessionCommand,
    SessionSettings,
    Settle,
    ShowRoster,
    Warn,
)
from dflow.distributed.transport.base import Handler, Peer, Reply, Transport
from dflow.distributed.transport.link import on_reader_thread
from dflow.distributed.wire.failures import error_of, failure_of
from dflow.distributed.wire.large_message import unpack
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.message import Answer, Message, Notice, Request
from dflow.distributed.wire.messages.roster import Roster, RosterChange
from dflow.lowering.queues.timers import Clock, Stoppable
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, InternalError, TransportClosed, WireError

LOGGER = logging.getLogger("dflow")

Told = TypeVar("Told", bound=Notice)


class SessionDriver:
    """A connection to the coordinator at `address`, as `name`, which is opened again after a loss.

    `beat`      called at each heartbeat of the task, once it has joined
    `process`   identity of this process among all that join under the name
    `settings`  how long and how often it reconnects
    `clock`     runs the calls of this session, and no others, since opening a connection delays them; closed with it
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        beat: Callable[[], None],
        *,
        name: str,
        process: str,
        settings: SessionSettings,
        clock: Clock,
    ) -> None:
        self.process = process
        #: Whether `close` was called.
        self.is_closed = False
        self._address = address
        self._transport = transport
        self._name = name
        self._clock = clock
        self._settings = settings
        self._session = CoordinatorSession(who=f"the coordinator at {address}", incarnation=process, settings=settings)
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._roster = Roster((), ())
        self._on_roster: list[Callable[[Roster], None]] = []
        self._on_lost: list[Callable[[str], None]] = []
        #: The functions to call when notices may have been lost, before later ones: as the task joins again, or loses
        #: the cluster. They must not block.
        self.on_gap: list[Callable[[], None]] = []
        #: By kind of notice, the functions to call with it.
        self._on_notice: defaultdict[type[Message], list[Callable[[Any], object]]] = defaultdict(list)
        self._beat = beat
        self._is_beating = False
        self._todo: deque[SessionCommand] = deque()
        self._is_carrying_out = False
        self._alarm_at_s: float | None = None
        self._alarm: Stoppable | None = None
        self._links: dict[int, Peer] = {}
        self._link_numbers = itertools.count(1)
        self._ask_numbers = itertools.count(1)
        self._answers: dict[int, Future[Any]] = {}

    def open(self, timeout_s: float) -> None:
        """Open the first connection.

        raises  DeadlineExceeded naming the coordinator, the address and `timeout_s`; what `Transport.connect` raises
        """
        link = next(self._link_numbers)
        peer = self._transport.connect(
            self._address,
            name=self._name,
            handler=_CoordinatorLink(self, link),
            who="the coordinator",
            timeout_s=timeout_s,
        )
        self._links[link] = peer
        self._handle(lambda at_s: self._session.opened(at_s, link))
        if peer.closed:  # it may have ended before the session knew about it
            self.link_ended(link, peer.closed)

    def open_later(self) -> None:
        """Open a connection on the clock's thread, and retry after a failure."""
        self._clock.after(0.0, self._try_to_open)

    def close(self, reason: str) -> None:
        """End the connection for good; a task that has joined then leaves with a fault. A second call does nothing.

        Requests that wait for an answer, and later ones, fail with TransportClosed.
        """
        self.is_closed = True
        self._handle(lambda at_s: self._session.end(reason))

    @property
    def ended(self) -> str:
        """Why the coordinator is lost for good, or the reason given to `close`; empty while neither is so."""
        return self._session.ended

    @property
    def outage(self) -> str:
        """The duration and the reason of the outage, as the end of a sentence; empty while there is a connection."""
        with self._changed:
            return self._session.outage(self._clock.now_s)

    @property
    def roster(self) -> Roster:
        """The tasks that have joined, including any that have left, and the expected ones."""
        with self._changed:
            return self._roster

    def wait_for_roster(self, condition: Callable[[Roster], bool], timeout_s: float) -> Roster:
        """Wait for a roster that fulfils the condition; return the newest one, even if `timeout_s` has passed first.

        raises  TransportClosed when the coordinator is lost for good meanwhile
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition(self._roster):
                if self._session.ended:
                    raise TransportClosed(self._session.ended)
                if not self._changed.wait(min(deadline - time.monotonic(), threading.TIMEOUT_MAX)):
                    break
            return self._roster

    def call_on_roster(self, callback: Callable[[Roster], None]) -> None:
        """Call back with each new roster, and immediately with the present one; the callback must not block."""
        with self._calling:
            with self._changed:
                self._on_roster.append(callback)
                roster = self._roster
            callback(roster)

    def call_on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back once with the reason when the coordinator is lost for good, or now if it is; not after `close`."""
        with self._changed:
            lost = "" if self.is_closed else self.ended
            if not lost:
                self._on_lost.append(callback)
        if lost:
            callback(lost)

    def call_on(self, kind: type[Told], callback: Callable[[Told], object]) -> None:
        """Call back with each notice of this kind; the callback must not block.

        A notice may be lost with a connection: see `on_gap`.
        """
        self._on_notice[kind].append(callback)

    def ask(self, message: Request[Answer], timeout_s: float) -> Answer:
        """Send the coordinator a request, and wait for its answer.

        raises  the error that it answers with; DeadlineExceeded, with the present outage if any; WireError for an
                answer that the request does not declare; TransportClosed when the session has ended; InternalError on a
                reader thread, which must not wait
        """
        what = type(message).__name__
        if on_reader_thread():
            raise InternalError(f"a handler waits for the coordinator to answer {what}; hand that to another thread")
        future = self.start(message)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                return future.result()
            raise DeadlineExceeded(
                f"the coordinator at {self._address} did not answer {what} of {self._name} within {timeout_s:g} s"
                f"{self.outage}"
            ) from None
        finally:
            future.cancel()

    def start(self, message: Request[Answer]) -> Future[Answer]:
        """Send the coordinator a request, and return its answer to come; `cancel` withdraws the request."""
        future: Future[Answer] = Future()
        with self._changed:
            ask = next(self._ask_numbers)
            self._answers[ask] = future
            self._decide(lambda at_s: self._session.ask(at_s, ask, message))
        future.add_done_callback(partial(self._done, ask))
        self._carry_out_all()
        return future

    def _done(self, ask: int, future: Future[Answer]) -> None:
        if future.cancelled():
            self._answers.pop(ask, None)
            self._handle(lambda at_s: self._session.withdraw(at_s, ask))

    def tell(self, message: Message) -> None:
        """Send a notification; dropped while this is no task of the cluster, or there is no connection."""
        link = self._session.joined_link
        if link is not None:
            self._notify(link, message)

    def _notify(self, link: int, message: Message) -> None:
        peer = self._links.get(link)
        if peer is not None:
            with contextlib.suppress(DflowError):  # the link reports the end of its connection
                peer.notify(message)

    def _try_to_open(self) -> None:
        try:
            self.open(self._settings.connect_s)
        except Exception as error:  # any error: the session waits for the outcome
            why = str(error) or type(error).__name__
            self._handle(lambda at_s: self._session.open_failed(at_s, why))

    def _wake(self) -> None:
        with self._changed:
            self._alarm_at_s = None
        self._handle(self._session.wake)

    def _beat_again(self) -> None:
        with self._changed:
            self._is_beating = False
            self._set_timers()
        if self._is_beating:
            self._beat()

    def link_ended(self, link: int, reason: str) -> None:
        """Forget the connection `link`, which has ended; the session then opens another."""
        self._links.pop(link, None)
        self._handle(lambda at_s: self._session.link_ended(at_s, link, reason))

    def link_heard(self, link: int, message: Message, payload: memoryview) -> None:
        """Pass a notification that came over the connection `link` to its callbacks, or to the session without any."""
        message = _unpacked(message, payload)
        callbacks = self._on_notice.get(type(message), [])
        for callback in callbacks:
            callback(message)
        if not callbacks:
            self._handle(lambda at_s: self._session.heard(at_s, link, message))

    def _handle(self, event: Callable[[float], list[SessionCommand]]) -> None:
        """Call a method of the session with the present time, and carry out its commands."""
        with self._changed:
            self._decide(event)
        self._carry_out_all()

    def _decide(self, event: Callable[[float], list[SessionCommand]]) -> None:
        self._todo.extend(event(self._clock.now_s))
        self._set_timers()
        self._changed.notify_all()

    def _set_timers(self) -> None:
        """Schedule the next heartbeat, if there is a task, and the session's next timeout.

        Closes the clock instead if the session has ended.
        """
        if self._session.ended:
            self._clock.close()
            return
        if self._session.joined_link is not None and not self._is_beating:
            self._clock.after(self._settings.heartbeat_s, self._beat_again)
            self._is_beating = True
        wake_at_s = self._session.wake_at_s
        if wake_at_s == self._alarm_at_s:
            return
        if self._alarm is not None:
            self._alarm.stop()
        if wake_at_s is not None:
            self._alarm = self._clock.after(wake_at_s - self._clock.now_s, self._wake)
        self._alarm_at_s = wake_at_s

    def _carry_out_all(self) -> None:
        """Carry out queued commands in order. One thread at a time does; others leave their commands to it."""
        while (command := self._next_command()) is not None:
            try:
                self._carry_out(command)
            finally:
                with self._changed:
                    self._is_carrying_out = False

    def _next_command(self) -> SessionCommand | None:
        with self._changed:
            if self._is_carrying_out or not self._todo:
                return None
            self._is_carrying_out = True
            return self._todo.popleft()

    def _carry_out(self, command: SessionCommand) -> None:
        match command:
            case OpenLink():
                self.open_later()
            case SendRequest(link, ask, message):
                self._send(link, ask, message)
            case EndLink(link, reason, last):
                if last is not None:
                    self._notify(link, last)
                if (peer := self._links.pop(link, None)) is not None:
                    peer.close(reason)
            case Settle(ask, message):
                answer = self._answers.pop(ask, None)
                if answer is None or not answer.set_running_or_notify_cancel():
                    return
                if isinstance(message, Failure):
                    answer.set_exception(error_of(message))
                else:
                    answer.set_result(message)
            case ShowRoster(roster):
                self._show(roster)
            case Warn(text, gives_up):
                LOGGER.warning("%s: %s", short_task_name(self._name), text)
                if gives_up:
                    self._call_on_gap()
                    with self._changed:
                        callbacks = [] if self.is_closed else list(self._on_lost)
                    for callback in callbacks:
                        callback(text)

    def _call_on_gap(self) -> None:
        for callback in self.on_gap:
            callback()

    def _send(self, link: int, ask: int, message: Request[Any]) -> None:
        peer = self._links.get(link)
        if peer is None:
            return
        try:
            peer.start(message, on_reply=partial(self._reply_came, link, ask))
        except TransportClosed as error:
            self.link_ended(link, str(error))
        except DflowError as error:
            self._reply_came(link, ask, error)

    def _reply_came(self, link: int, ask: int, reply: Outcome[Reply[Any]]) -> None:
        if isinstance(reply, TransportClosed):
            return  # the link reports its end
        message = failure_of(reply) if isinstance(reply, BaseException) else _unpacked(*reply)
        if isinstance(message, (Roster, RosterChange)):
            self._call_on_gap()
        self._handle(lambda at_s: self._session.answered(at_s, link, ask, message))

    def _show(self, roster: Roster) -> None:
        with self._calling:
            with self._changed:
                self._roster = roster
                callbacks = list(self._on_roster)
                self._changed.notify_all()
            for callback in callbacks:
                callback(roster)


class _CoordinatorLink(Handler):
    """Passes the events of the connection with number `link` to `owner`."""

    def __init__(self, owner: SessionDriver, link: int) -> None:
        self._owner = owner
        self._link = link

    def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
        """Pass the notification to the driver."""
        self._owner.link_heard(self._link, message, payload)

    def on_close(self, peer: Peer, reason: str) -> None:
        """Pass the end of the connection to the driver."""
        self._owner.link_ended(self._link, reason)


def _unpacked(message: Message, payload: memoryview) -> Message:
    try:
        return unpack(message, payload)
    except WireError as error:
        return failure_of(error)
