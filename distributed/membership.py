"""Which tasks are in the cluster, which have left and why, decided from events alone.

Invariants:
- at most one live task per name and per connection;
- a task once joined is listed for ever, and `left` is set exactly when it is no longer live;
- a task that joins again under its old name is a new entry, and the old one keeps its time and reason;
- the roster is published after every change and at no other time.

A task is live from its Join until it says Leave, its connection ends, or no heartbeat came for
`heartbeat_timeout_s`. No clock is read: time comes with the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from dflow.distributed.coordinator_events import Ticked
from dflow.distributed.messages import Roster, TaskInfo
from dflow.tracing.task_name import short_task_name, split_task_name, task_name

#: Why a worker leaves when its program has ended well.
FINISHED = "finished"
#: Why a server leaves when it was told to stop.
STOPPED = "stopped"
#: Reasons for leaving that are no fault.
NORMAL_ENDS = frozenset({FINISHED, STOPPED})


@dataclass(frozen=True)
class Joined:
    """A task asked to join over the connection `peer`, and listens at `address`."""

    at_s: float
    peer: int
    task: str
    address: str


@dataclass(frozen=True)
class HeartbeatArrived:
    """A task said over `peer` that it is alive."""

    at_s: float
    peer: int
    task: str


@dataclass(frozen=True)
class ConnectionLost:
    """The connection `peer` has ended."""

    at_s: float
    peer: int
    reason: str


@dataclass(frozen=True)
class LeaveAsked:
    """The task behind `peer` goes by its own will."""

    at_s: float
    peer: int
    reason: str


MembershipEvent = Joined | HeartbeatArrived | ConnectionLost | LeaveAsked | Ticked


@dataclass(frozen=True)
class RefuseJoin:
    """Tell the asker that it may not join; the text has both addresses and the remedy."""

    text: str


@dataclass(frozen=True)
class ReleaseTask:
    """Take back what the task held: it has left. `silent` says that its connection may still be open."""

    task: str
    peer: int
    reason: str
    silent: bool = False


@dataclass(frozen=True)
class PublishRoster:
    """Send the roster to every live task."""


MembershipCommand = RefuseJoin | ReleaseTask | PublishRoster


@dataclass(frozen=True)
class _Live:
    """A live task: its connection, its place in the list of all that joined, and when it was last heard."""

    peer: int
    entry: int
    heard_at_s: float


class Membership:
    """The tasks of one cluster.

    `jobs`                 the tasks that are expected, as job -> how many
    `heartbeat_timeout_s`  a task not heard of for so long has left
    """

    def __init__(self, jobs: Mapping[str, int], heartbeat_timeout_s: float = 10.0) -> None:
        self._spec = tuple(task_name(job, index) for job, count in jobs.items() for index in range(count))
        self._timeout_s = heartbeat_timeout_s
        self._joined: list[TaskInfo] = []
        self._live: dict[str, _Live] = {}

    def handle(self, event: MembershipEvent) -> list[MembershipCommand]:
        """Take note of the event and say what follows from it."""
        match event:
            case Joined():
                return self._join(event)
            case HeartbeatArrived(at_s, peer, task):
                if self.is_live(task, peer):
                    self._live[task] = replace(self._live[task], heard_at_s=at_s)
                return []
            case ConnectionLost(at_s, peer, reason) | LeaveAsked(at_s, peer, reason):
                gone = [task for task, live in self._live.items() if live.peer == peer]
                return self._release(gone, at_s, reason)
            case Ticked(at_s):
                silent = [task for task, live in self._live.items() if at_s - live.heard_at_s >= self._timeout_s]
                return self._release(silent, at_s, f"no heartbeat for {self._timeout_s:.1f} s", silent=True)

    def is_live(self, task: str, peer: int) -> bool:
        """Whether `task` is live and its connection is `peer`."""
        return task in self._live and self._live[task].peer == peer

    def absence(self, task: str) -> str:
        """Why nobody else may speak for `task`: it is live, or when and why it left last, or that it never joined."""
        if task in self._live:
            return f"{short_task_name(task)} is live over another"
        for info in reversed(self._joined):
            if info.task == task and info.left_at_s is not None:
                return f"{short_task_name(task)} left at {info.left_at_s:.1f} s: {info.left}"
        return f"{short_task_name(task)} has not joined"

    def roster(self) -> Roster:
        """All that have joined, in order of joining, and the expected ones that never did."""
        seen = {info.task for info in self._joined}
        return Roster(tuple(self._joined), tuple(task for task in self._spec if task not in seen))

    def live_peers(self) -> tuple[int, ...]:
        """The connections of the live tasks, in order of joining."""
        return tuple(live.peer for live in sorted(self._live.values(), key=lambda live: live.entry))

    def available(self, job: str) -> tuple[str, ...]:
        """The tasks of `job` that are live or still expected, by index."""
        names = {*self._live, *self.roster().expected}
        return tuple(sorted((task for task in names if split_task_name(task)[0] == job), key=split_task_name))

    def jobs(self) -> tuple[str, ...]:
        """Every job with a live or expected task."""
        return tuple(sorted({split_task_name(task)[0] for task in (*self._live, *self.roster().expected)}))

    def _join(self, event: Joined) -> list[MembershipCommand]:
        split_task_name(event.task)
        if self.is_live(event.task, event.peer):
            return []
        refusal = self._refusal(event)
        if refusal:
            return [RefuseJoin(refusal)]
        self._live[event.task] = _Live(event.peer, len(self._joined), event.at_s)
        self._joined.append(TaskInfo(event.task, event.address, event.at_s))
        return [PublishRoster()]

    def _refusal(self, event: Joined) -> str:
        if event.task in self._live:
            held = self._joined[self._live[event.task].entry].address
            return (
                f"{short_task_name(event.task)} is already live at {held}, so the one at {event.address} may not "
                "join; give it another index, or end the first"
            )
        for task, live in self._live.items():
            if live.peer == event.peer:
                return (
                    f"this connection has joined as {short_task_name(task)} and may not join as "
                    f"{short_task_name(event.task)} too; open another connection"
                )
        return ""

    def _release(self, tasks: list[str], at_s: float, reason: str, silent: bool = False) -> list[MembershipCommand]:
        commands: list[MembershipCommand] = []
        for task in tasks:
            live = self._live.pop(task)
            self._joined[live.entry] = msgspec.structs.replace(self._joined[live.entry], left_at_s=at_s, left=reason)
            commands.append(ReleaseTask(task, live.peer, reason, silent))
        return [*commands, PublishRoster()] if commands else []
