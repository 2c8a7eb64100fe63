"""A client's session with the coordinator as a state machine: its requests, its links, and recovery after a loss.

No clock, no sockets, no threads: each method is an event and takes the time, and actions are commands. A link is one
connection, with a number that is never reused; the same holds for a request (`ask`).

Invariants:
- each `ask` is settled by exactly one Settle, unless it is withdrawn;
- a request without an answer is sent again over the next link, in the original order, after the task has rejoined; the
  coordinator executes none twice, since claims and arrivals have numbers and the others may be repeated;
- a task rejoins as the same member: in the same incarnation, and never in another cluster;
- a lost link is opened again after pauses that grow up to `longest_pause_s`, each shortened at random by
  a number that `incarnation` determines; the session ends with one Warn that says so when that failed for `give_up_s`,
  or when the coordinator has declared the task dead;
- each outage is logged when it begins and when it ends, in a process that is a task;
- `roster` never gets older: of two rosters, the one with the greater version is shown last.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec

from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.message import Mark, Marked, Message, Request
from dflow.distributed.wire.messages.roster import Announcement, Join, Leave, Roster, RosterChange, changed_roster

#: The request number of a rejoin; those of the program are greater.
REJOIN = 0


@dataclass(frozen=True)
class SessionSettings:
    """Timeouts of a session, in s, and its rule to rejoin.

    `first_pause_s`    longest pause before the first attempt to reconnect; the limit doubles for each later one, and a
                       pause has 50 to 100 % of it
    `longest_pause_s`  longest pause before any attempt
    `connect_s`        longest duration of each attempt
    `join_s`           longest wait for the answer to a Join; then the link counts as dead
    `give_up_s`        length of an outage after which the session ends
    `heartbeat_s`      interval between the heartbeats of a task
    `rejoins_anew`     whether a task that the coordinator declared dead meanwhile joins as a new task of the same name.
                       This suits a task server, which runs no program that would have to start again
    """

    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    connect_s: float = 2.0
    join_s: float = 10.0
    give_up_s: float = 600.0
    heartbeat_s: float = 1.0
    rejoins_anew: bool = False


@dataclass(frozen=True)
class OpenLink:
    """Connect to the coordinator, and call `opened` or `open_failed` with the outcome."""


@dataclass(frozen=True)
class SendRequest:
    """Send a request over the link; its answer must come back to `answered` with the same `ask`."""

    link: int
    ask: int
    message: Request[Any]


@dataclass(frozen=True)
class EndLink:
    """Close the link, after the notice `last` if any; `link_ended` ignores this link."""

    link: int
    reason: str
    last: Leave | None = None


@dataclass(frozen=True)
class Settle:
    """Pass the program the answer to its request `ask`, possibly a `Failure`."""

    ask: int
    message: Message


@dataclass(frozen=True)
class ShowRoster:
    """Pass a newer roster to the program."""

    roster: Roster


@dataclass(frozen=True)
class Warn:
    """Log that the coordinator, or a task that others wait for, is lost or back: once each per outage.

    `gives_up`  whether the session has ended, as the coordinator is lost for good: tell the program too
    """

    text: str
    gives_up: bool = False


SessionCommand = OpenLink | SendRequest | EndLink | Settle | ShowRoster | Warn


class CoordinatorSession:
    """State machine of one client's session: events are methods, which return commands.

    It begins while the first link is being opened.
    `who`          name and address of the coordinator, for errors
    `incarnation`  unique id of this process
    """

    def __init__(self, *, who: str, incarnation: str, settings: SessionSettings = SessionSettings()) -> None:
        self._who = who
        self._settings = settings
        self._random = random.Random(incarnation)
        self._incarnation = incarnation
        self._lives = 1
        self._link: int | None = None
        self._is_opening = True
        self._pauses = 0
        self._open_at_s = 0.0
        self._down_since_s: float | None = None
        self._down_reason = ""
        self._member: Join | None = None
        self._join_ask = REJOIN
        #: Deadline of the answer to a Join; None while none is open.
        self._join_by_s: float | None = None
        self._asks: dict[int, Request[Any]] = {}
        #: By run, the number of the last claim whose answer was seen.
        self._last_answered: dict[tuple[type[Message], str], int] = {}
        self._ended: Failure | None = None
        self._mark = Mark()
        self.roster = Roster((), ())

    @property
    def ended(self) -> str:
        """Why the session has ended; empty while it has not."""
        return self._ended.text if self._ended is not None else ""

    @property
    def _is_in(self) -> bool:
        """Whether there is a link over which requests other than a Join may be sent."""
        return self._link is not None and self._join_by_s is None

    @property
    def joined_link(self) -> int | None:
        """The link over which this client is a task of the cluster now; None if there is none."""
        return self._link if self._is_in and self._member is not None else None

    @property
    def wake_at_s(self) -> float | None:
        """Time when the driver must call `wake`; None while the session waits for no time."""
        if self._ended is not None or self._is_opening:
            return None
        return self._open_at_s if self._link is None else self._join_by_s

    def outage(self, at_s: float) -> str:
        """The duration and the reason of the outage, as the end of a sentence; empty while there is a connection."""
        if self._down_since_s is None:
            return ""
        return f"; there is no connection to it since {at_s - self._down_since_s:.1f} s: {self._down_reason}"

    # Links.

    def opened(self, at_s: float, link: int) -> list[SessionCommand]:
        """Use a link that was opened: send the Join of a task, or else the pending requests."""
        if self._ended is not None:
            return [EndLink(link, self._ended.text)]
        self._is_opening = False
        self._link = link
        if self._member is not None:
            self._join_by_s = at_s + self._settings.join_s
            return [SendRequest(link, self._join_ask, self._joining(self._member))]
        return [*self._up(at_s), *self._send_all()]

    def open_failed(self, at_s: float, why: str) -> list[SessionCommand]:
        """Handle a failed attempt to open a link: retry after a pause, or give up; warn at the start of an outage."""
        self._is_opening = False
        return [] if self._ended is not None else self._lost(at_s, why)

    def link_ended(self, at_s: float, link: int, reason: str) -> list[SessionCommand]:
        """Handle the end of a link: reconnect after a pause, and warn at the start of an outage.

        Ignores a link that is not the present one.
        """
        if link != self._link:
            return []
        self._link = None
        return self._lost(at_s, reason)

    def wake(self, at_s: float) -> list[SessionCommand]:
        """Act at `wake_at_s`: reconnect, give up, or end a link whose Join was not answered."""
        if self._link is not None:
            is_dead = self._join_by_s is not None and at_s >= self._join_by_s
            return self._drop(at_s, self._link, "a Join was not answered") if is_dead else []
        if self._is_opening or self._ended is not None:
            return []
        assert self._down_since_s is not None
        down_s = at_s - self._down_since_s
        if down_s >= self._settings.give_up_s:
            text = f"{self._who} is lost: it could not be reached for {down_s:.1f} s: {self._down_reason}"
            return self._give_up(Failure("TransportClosed", text))
        if at_s < self._open_at_s:
            return []
        self._is_opening = True
        return [OpenLink()]

    def end(self, reason: str) -> list[SessionCommand]:
        """End the session for the program: a task leaves, and pending requests are settled with TransportClosed."""
        if self._ended is not None:
            return []
        return self._end(Failure("TransportClosed", f"the connection to {self._who} was closed: {reason}"), reason)

    def _joining(self, member: Join) -> Join:
        """Return the Join to send now, with the roster's version and the newest mark of the coordinator's state."""
        return msgspec.structs.replace(member, since=self.roster.version, mark=self._mark)

    def _drop(self, at_s: float, link: int, why: str) -> list[SessionCommand]:
        return [EndLink(link, why), *self.link_ended(at_s, link, why)]

    def _lost(self, at_s: float, why: str) -> list[SessionCommand]:
        self._join_by_s = None
        settings = self._settings
        warnings: list[SessionCommand] = []
        if self._down_since_s is None:
            self._down_since_s = at_s
            if self._is_announced:
                tried = f"it is tried again for {settings.give_up_s:g} s, and steps go on meanwhile"
                warnings = [Warn(f"the connection to {self._who} has ended: {why}; {tried}")]
        self._down_reason = why
        pause_s = min(settings.longest_pause_s, settings.first_pause_s * 2.0 ** min(self._pauses, 60))
        self._pauses += 1
        self._open_at_s = at_s + pause_s * self._random.uniform(0.5, 1.0)
        return [*warnings, *self.wake(at_s)]

    @property
    def _is_announced(self) -> bool:
        """Whether to log outages: this client has joined, and is no tool that only sends requests."""
        return self._member is not None and bool(self._member.cluster)

    def _up(self, at_s: float) -> list[SessionCommand]:
        since_s, self._down_since_s, self._down_reason = self._down_since_s, None, ""
        self._join_by_s = None
        if since_s is None or not self._is_announced:
            return []
        return [Warn(f"the connection to {self._who} is back after {at_s - since_s:.1f} s")]

    def _send_all(self) -> list[SessionCommand]:
        assert self._link is not None
        return [SendRequest(self._link, ask, message) for ask, message in self._asks.items()]

    def _give_up(self, failure: Failure) -> list[SessionCommand]:
        return [*self._end(failure, failure.text), Warn(failure.text, gives_up=True)]

    def _end(self, failure: Failure, reason: str) -> list[SessionCommand]:
        self._ended = failure
        commands: list[SessionCommand] = []
        if self._link is not None:
            member = self._member if self._is_in else None
            last = None if member is None else Leave(member.task, reason)
            commands.append(EndLink(self._link, reason, last))
        commands += [Settle(ask, failure) for ask in self._asks]
        self._link = None
        self._asks.clear()
        return commands

    # Requests.

    def ask(self, at_s: float, ask: int, message: Request[Any]) -> list[SessionCommand]:
        """Send a request of the program, or keep it until it can be sent; its number `ask` is greater than all before.

        A Join makes the client a task, and other requests wait for its answer. After the end, settles the request with
        the session's error.
        """
        if self._ended is not None:
            return [Settle(ask, self._ended)]
        match message:
            case Join(task, address):
                self._member = message = Join(task, address, self._incarnation)
                self._join_ask, self._join_by_s = ask, at_s + self._settings.join_s
            case _ if message.series:
                last = self._last_answered.get(_series(message), 0)
                message = msgspec.structs.replace(message, number=ask, last=last)
            case _ if message.is_numbered:
                message = msgspec.structs.replace(message, number=ask)
        self._asks[ask] = message
        if self._link is None or not (self._is_in or isinstance(message, Join)):
            return []
        return [SendRequest(self._link, ask, message)]

    def withdraw(self, at_s: float, ask: int) -> list[SessionCommand]:
        """Forget a request whose answer the program awaits no longer. Without its Join, the client is no task."""
        self._asks.pop(ask, None)
        if self._member is None or ask != self._join_ask:
            return []
        self._member = None
        return [] if self._link is None else [*self._up(at_s), *self._send_all()]

    def answered(self, at_s: float, link: int, ask: int, message: Message) -> list[SessionCommand]:
        """Settle the request `ask` with its answer, possibly a `Failure`, and reset the pauses.

        The answer to a Join also updates the roster, and ends the session if the coordinator does not take a task back.
        Ignores answers over an earlier link.
        """
        if link != self._link:
            return []
        # An answer resets the pauses; a connection alone does not.
        self._pauses = 0
        self._keep_mark(message)
        if self._member is not None and ask == self._join_ask:
            return self._join_answered(at_s, ask, message, self._member)
        asked = self._asks.pop(ask, None)
        if asked is None:
            return []
        if asked.series and isinstance(message, asked.replies):
            self._last_answered[_series(asked)] = ask
        elif isinstance(asked, Leave):
            self._member = None
        return [Settle(ask, message)]

    def _join_answered(self, at_s: float, ask: int, message: Message, member: Join) -> list[SessionCommand]:
        assert self._link is not None
        is_first = self._asks.pop(ask, None) is not None
        if isinstance(message, (Roster, RosterChange)):
            roster = message if isinstance(message, Roster) else changed_roster(self.roster, message)
            self._member = msgspec.structs.replace(member, cluster=roster.cluster)
            self._join_ask = REJOIN
            settled = [Settle(ask, roster)] if is_first else []
            return [*self._up(at_s), *self._show(roster), *settled, *self._send_all()]
        if is_first:
            self._member = None
            return [*self._up(at_s), Settle(ask, message), *self._send_all()]
        why = message if isinstance(message, Failure) else Failure("WireError", f"{self._who} answered a Join wrongly")
        if why.kind == "TaskLost" and self._settings.rejoins_anew:
            self._lives += 1
            self._member = msgspec.structs.replace(member, incarnation=f"{self._incarnation}.{self._lives}")
            return [SendRequest(self._link, REJOIN, self._joining(self._member))]
        return self._give_up(Failure(why.kind, f"{self._who} did not take this task back: {why.text}"))

    # Rosters.

    def _keep_mark(self, message: Message) -> None:
        """Keep the newest mark of the coordinator's state. A mark from another start of the coordinator is newer."""
        if isinstance(message, Marked) and message.mark.start:
            is_newer = message.mark.start != self._mark.start or message.mark.revision > self._mark.revision
            self._mark = message.mark if is_newer else self._mark

    def heard(self, at_s: float, link: int, message: Message) -> list[SessionCommand]:
        """Apply a notice: show a newer roster, or warn of an announcement; end the link if roster changes were lost."""
        if link != self._link:
            return []
        self._keep_mark(message)
        match message:
            case Announcement(text):
                return [Warn(text)]
            case Roster():
                return self._show(message)
            case RosterChange(since, version) if since <= self.roster.version < version:
                return self._show(changed_roster(self.roster, message))
            case RosterChange(since, version) if self.roster.version < since:
                text = f"roster {self.roster.version} is here, and the changes since {since} came: some were lost"
                return self._drop(at_s, link, text)
            case _:
                return []

    def _show(self, roster: Roster) -> list[SessionCommand]:
        if roster.version <= self.roster.version and self.roster.tasks:
            return []
        self.roster = roster
        return [ShowRoster(roster)]


def _series(message: Message) -> tuple[type[Message], str]:
    return type(message), getattr(message, message.series)
