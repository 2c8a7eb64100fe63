"""The shell around the real `CoordinatorSession` of a simulated process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from dflow.distributed.client.coordinator_session import (
    Answered,
    Asking,
    CoordinatorSession,
    Ending,
    EndLink,
    GaveUp,
    Heard,
    LinkEnded,
    Opened,
    OpenFailed,
    OpenLink,
    Send,
    SessionCommand,
    SessionEvent,
    SessionSettings,
    Settle,
    ShowRoster,
    Tell,
    Warn,
    Withdrawn,
    Woke,
)
from dflow.distributed.simulation.events import EventQueue, Timer
from dflow.distributed.simulation.link import SimulatedTransport
from dflow.distributed.simulation.network import Process
from dflow.distributed.simulation.script import Resolve, Wait
from dflow.distributed.transport.base import Peer, RefuseAll, Reply
from dflow.distributed.wire.failures import error_from, failure_of
from dflow.distributed.wire.large_message import unpack
from dflow.distributed.wire.messages.connection import Failure
from dflow.distributed.wire.messages.message import Message, Request
from dflow.distributed.wire.messages.roster import Heartbeat, Roster
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DflowError, TransportClosed

HEARTBEAT_S = 3.0


class Client:
    """One process's client of the coordinator at `address`; it connects on construction."""

    def __init__(
        self,
        events: EventQueue,
        process: Process,
        transport: SimulatedTransport,
        address: str,
        name: str,
        settings: SessionSettings,
        on_roster: Callable[[Roster], None],
        on_gave_up: Callable[[str], None],
    ) -> None:
        self._events = events
        self._process = process
        self._transport = transport
        self._address = address
        self._name = name
        self._on_roster = on_roster
        self._on_gave_up = on_gave_up
        self._session = CoordinatorSession(
            who="the coordinator", incarnation=str(process), settings=settings, seed=process.life
        )
        self._todo: deque[SessionCommand] = deque()
        self._is_carrying_out = False
        self._links: dict[int, Peer] = {}
        self._link_numbers = itertools.count(1)
        self._ask_numbers = itertools.count(1)
        self._answers: dict[int, Resolve] = {}
        self._alarm: Timer | None = None
        process.post(self._open)
        process.post(self._beat)

    def ask(self, message: Request[Any], timeout_s: float) -> Wait:
        """Send a request and wait for the answer, a message, even while the coordinator is absent."""
        ask = next(self._ask_numbers)

        def start(resolve: Resolve) -> None:
            self._answers[ask] = resolve
            self._handle(Asking(self._events.now_s, ask, message))

        def withdraw() -> None:
            self._answers.pop(ask, None)
            self._handle(Withdrawn(self._events.now_s, ask))

        return Wait(f"the coordinator's answer to {type(message).__name__}", timeout_s, start, withdraw)

    def end(self, reason: str) -> None:
        """End the session with the coordinator."""
        self._handle(Ending(self._events.now_s, reason))

    def heard(self, link: int, message: Message) -> None:
        """Handle a notification from the coordinator."""
        self._handle(Heard(self._events.now_s, link, message))

    def link_ended(self, link: int, reason: str) -> None:
        """Handle the end of a connection."""
        if self._links.pop(link, None) is not None:
            self._handle(LinkEnded(self._events.now_s, link, reason))

    def _handle(self, event: SessionEvent) -> None:
        self._todo.extend(self._session.handle(event))
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        while self._todo:
            self._carry_out(self._todo.popleft())
        self._is_carrying_out = False
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.stop()
        wake_at_s = self._session.wake_at_s
        if wake_at_s is not None:
            self._alarm = self._events.at(wake_at_s, partial(self._process.post, self._wake), is_routine=True)

    def _wake(self) -> None:
        self._handle(Woke(self._events.now_s))

    def _open(self) -> None:
        link = next(self._link_numbers)
        try:
            self._links[link] = self._transport.connect(
                self._address, name=self._name, handler=_Heard(self, link), who="the coordinator", timeout_s=0.0
            )
        except DflowError as error:
            self._handle(OpenFailed(self._events.now_s, str(error)))
        else:
            self._handle(Opened(self._events.now_s, link))

    def _beat(self) -> None:
        if self._session.ended:
            return
        link = self._session.joined_link
        if link is not None and link in self._links:
            self._tell(link, Heartbeat(self._name))
        self._process.after(HEARTBEAT_S, self._beat, is_routine=True)

    def _carry_out(self, command: SessionCommand) -> None:
        match command:
            case OpenLink():
                self._process.post(self._open)
            case Send(link, ask, message):
                self._send(link, ask, message)
            case Tell(link, message):
                self._tell(link, message)
            case EndLink(link, reason):
                if (peer := self._links.pop(link, None)) is not None:
                    peer.close(reason)
            case Settle(ask, message):
                if (resolve := self._answers.pop(ask, None)) is not None:
                    resolve(error_from(message) if isinstance(message, Failure) else message)
            case ShowRoster(roster):
                self._on_roster(roster)
            case Warn():
                pass
            case GaveUp(reason):
                self._on_gave_up(reason)

    def _send(self, link: int, ask: int, message: Request[Any]) -> None:
        peer = self._links.get(link)
        if peer is None:
            return
        try:
            peer.start(message, on_reply=partial(self._reply_came, link, ask))
        except TransportClosed as error:
            self.link_ended(link, str(error))

    def _reply_came(self, link: int, ask: int, reply: Outcome[Reply[Any]]) -> None:
        if isinstance(reply, TransportClosed):
            return  # `link_ended` handles the end of the link
        message = failure_of(reply) if isinstance(reply, BaseException) else unpack(*reply)
        self._handle(Answered(self._events.now_s, link, ask, message))

    def _tell(self, link: int, message: Message) -> None:
        peer = self._links.get(link)
        if peer is not None and not peer.closed:
            peer.notify(message)


class _Heard(RefuseAll):
    """The handler of one connection; it passes notifications and the end to the client."""

    def __init__(self, client: Client, link: int) -> None:
        self._client = client
        self._link = link

    def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
        self._client.heard(self._link, unpack(message, payload))

    def on_close(self, peer: Peer, reason: str) -> None:
        self._client.link_ended(self._link, reason)
