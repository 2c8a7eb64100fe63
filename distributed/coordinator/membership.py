"""The roster of a cluster: its live tasks, and the tasks that left with their reasons; a pure function of events.

Invariants:
- at most one live task per name and per connection;
- a task that has joined is listed, and its `left` is set exactly when it is no longer live; of the tasks that have
  left, the last `MOST_LEFT` stay listed;
- a task that rejoins in the same incarnation stays the same member, and no task is notified; another incarnation is a
  new entry, and the old entry keeps its time and reason;
- a task that was declared dead may not rejoin in the same incarnation while it is listed: its work went to others;
- every change of the roster makes its next version, and is published once: immediately while the cluster is small,
  else with the other changes of a tick, so that N joins do not send N messages to each of N tasks;
- after a restart the members are those of before, away until they rejoin;
- a pause of the coordinator itself does not count as a task's silence.

A task is live from its Join until its Leave, until `heartbeat_timeout_s` without a heartbeat, or until `rejoin_s` after
its connection ended. No clock is read: events carry the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

import msgspec

from dflow.distributed.coordinator.coordinator_events import Started, Ticked
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.wire.messages.roster import Roster, RosterChange, TaskInfo
from dflow.tracing.devices.task_name import short_task_name, split_task_name, task_name

#: Reason for leaving of a worker whose program has ended well.
FINISHED = "finished"
#: Reason for leaving of a server that received a request to stop.
STOPPED = "stopped"
#: With more live tasks than this, changes of the roster wait for the next tick.
PUBLISH_AT_ONCE = 64
#: At most this many tasks that have left stay listed.
MOST_LEFT = 1000
#: Least pause between two ticks that counts as a pause of the coordinator, however short the heartbeat timeout.
LONG_PAUSE_S = 2.0
#: Reasons for leaving that are no fault.
NORMAL_ENDS = frozenset({FINISHED, STOPPED})


@dataclass(frozen=True)
class Joined:
    """Task `task`, which listens at `address`, asked to join over connection `peer`; `cluster` is the one it knows."""

    at_s: float
    peer: int
    task: str
    address: str
    incarnation: str = ""
    cluster: str = ""


@dataclass(frozen=True)
class HeartbeatArrived:
    """A heartbeat of the task arrived over `peer`."""

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
    """The task behind `peer` leaves voluntarily."""

    at_s: float
    peer: int
    reason: str


MembershipEvent = Started | Joined | HeartbeatArrived | ConnectionLost | LeaveAsked | Ticked


@dataclass(frozen=True)
class RefuseJoin:
    """Answer the Join with an error; the text has both sides and the remedy. `kind` names the error's class."""

    text: str
    kind: str = "RemoteError"


@dataclass(frozen=True)
class ReleaseTask:
    """Release what the task held in this life: it has left."""

    task: str
    life: int
    reason: str


@dataclass(frozen=True)
class EndConnection:
    """Close the connection if it is still open: it no longer belongs to a task."""

    peer: int
    reason: str


@dataclass(frozen=True)
class PublishRoster:
    """Notify every live task of the changes since version `since`: the entries `lives`, and those `dropped`."""

    since: int
    version: int
    lives: tuple[int, ...]
    dropped: tuple[int, ...] = ()


MembershipCommand = RefuseJoin | ReleaseTask | EndConnection | PublishRoster


@dataclass(frozen=True)
class _LiveTask:
    """A live task: the number of its life, its connection (None while it is away), and its deadline.

    It is declared dead at `until_s`, for `reason`.
    """

    life: int
    peer: int | None
    until_s: float
    reason: str


class _Identity(msgspec.Struct, frozen=True):
    """Id of the cluster, and number of starts of its coordinator."""

    cluster: str = ""
    epoch: int = 0


class _RosterVersion(msgspec.Struct, frozen=True):
    """Number of changes of the roster, and number of tasks that have left."""

    version: int = 0
    left: int = 0


class Membership:
    """The tasks of one cluster, kept in `records`.

    `jobs`                 number of expected tasks by job
    `heartbeat_timeout_s`  a task without a heartbeat for this time has left
    `rejoin_s`             a task without a connection for this time has left
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        heartbeat_timeout_s: float = 10.0,
        rejoin_s: float = 1.0,
        records: DurableRecords | None = None,
    ) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._rejoin_s = rejoin_s
        self._records = records or DurableRecords()
        #: By life, in order of joining.
        self._joined: dict[int, TaskInfo] = {}
        self._next_life = 0
        self._left: deque[int] = deque()
        self._live: dict[str, _LiveTask] = {}
        self._names_of: dict[int, str] = {}
        self._lives_of: dict[str, list[int]] = {}
        self._expected = dict.fromkeys(task_name(job, index) for job, count in jobs.items() for index in range(count))
        self._identity = next((found for _, found in self._records.load(_IDENTITY, _Identity)), _Identity())
        counted = next((found for _, found in self._records.load(_VERSION, _RosterVersion)), _RosterVersion())
        self._version = self._published = counted.version
        self._left_in_all = counted.left
        self._ticked_at_s: float | None = None
        self._available: dict[str, tuple[str, ...]] | None = None
        self._unpublished: dict[int, None] = {}
        #: The version before each listed life joined.
        self._joined_after: dict[int, int] = {}
        for key, info in self._records.load(_LIFE, TaskInfo):
            # A life keeps its number, which `_add` takes from `_next_life`.
            self._next_life = int(key)
            self._add(info)
        self._left.extend(
            sorted((life for life, info in self._joined.items() if info.left_at_s is not None), key=self._end)
        )
        self._dropped: list[int] = []
        #: By life, the version that last changed it, oldest first; `_dropped_at` has for each dropped life the versions
        #: of its drop and before its joining. Both are complete after version `_complete_at`.
        self._changed_at: dict[int, int] = {}
        self._dropped_at: deque[tuple[int, int, int]] = deque()
        self._complete_at = self._version

    def handle(self, event: MembershipEvent) -> list[MembershipCommand]:
        """Apply the event and return the commands that follow from it."""
        commands = self._decide(event)
        is_due = len(self._live) <= PUBLISH_AT_ONCE or isinstance(event, Ticked)
        return [*commands, self._publish()] if self._unpublished and is_due else commands

    def _decide(self, event: MembershipEvent) -> list[MembershipCommand]:
        match event:
            case Started():
                return self._start(event)
            case Joined():
                return self._join(event)
            case HeartbeatArrived(at_s, peer, task):
                if self.is_live(task, peer):
                    self._hear(task, at_s)
                return []
            case LeaveAsked(at_s, peer, reason):
                gone = self._names_of.get(peer)
                return self._release([gone] if gone else [], at_s, reason)
            case ConnectionLost(at_s, peer, reason):
                gone = self._names_of.pop(peer, None)
                if gone is not None:
                    live = self._live[gone]
                    until_s = min(live.until_s, at_s + self._rejoin_s)
                    self._live[gone] = replace(live, peer=None, until_s=until_s, reason=reason)
                return []
            case Ticked(at_s):
                self._excuse_pause(at_s)
                return self._release([task for task, live in self._live.items() if at_s >= live.until_s], at_s)

    def is_live(self, task: str, peer: int) -> bool:
        """Whether `task` is live and its connection is `peer`."""
        return self._names_of.get(peer) == task

    def is_of_a_task(self, peer: int) -> bool:
        """Whether the connection `peer` belongs to a live task."""
        return peer in self._names_of

    def life(self, task: str) -> int:
        """Return the number of the live task's life, which no other life of any task shares."""
        return self._live[task].life

    def process(self, task: str) -> str:
        """Return the process of a live task; empty when the task is not live."""
        live = self._live.get(task)
        return "" if live is None else self._joined[live.life].process

    def end_of_process(self, task: str, process: str) -> str:
        """When and why that process of the task last left; empty if it is live, or its end is no longer listed."""
        for life in reversed(self._lives_of.get(task, [])):
            info = self._joined[life]
            if info.process == process:
                return "" if info.left_at_s is None else self._end_of(info)
        return ""

    @property
    def version(self) -> int:
        """The roster's version: its number of changes."""
        return self._version

    def is_there(self, task: str) -> bool:
        """Whether `task` is live, even if away."""
        return task in self._live

    def absence(self, task: str) -> str:
        """Why another connection may not act for `task`: it is live, or when and why it last left, or never joined."""
        if task in self._live:
            live = self._live[task]
            gone = f"is away since its connection ended: {live.reason}" if live.peer is None else "is live over another"
            return f"{short_task_name(task)} {gone}"
        if task in self._lives_of:
            return self._end_of(self._joined[self._lives_of[task][-1]])
        return f"{short_task_name(task)} has not joined"

    def roster(self) -> Roster:
        """Return all tasks that have joined, in order of joining, and the expected ones that never did."""
        identity = self._identity
        return Roster(
            tuple(self._joined.values()), tuple(self._expected), self._version, identity.cluster, identity.epoch
        )

    @property
    def cluster(self) -> str:
        """Id of this cluster."""
        return self._identity.cluster

    @property
    def epoch(self) -> int:
        """Number of starts of the coordinator."""
        return self._identity.epoch

    def changes_since(self, version: int) -> RosterChange | None:
        """Return the changes of the roster after `version`; None if they are no longer all known."""
        if not self._complete_at <= version <= self._version:
            return None
        newer = takewhile(lambda change: change[1] > version, reversed(self._changed_at.items()))
        entries = tuple(self._joined[life] for life, _ in reversed(list(newer)))
        dropped = [(life, before) for at, life, before in self._dropped_at if at > version]
        if any(before >= version for _, before in dropped):
            # The task joined and left since: a receiver that still expects it learns that from a whole roster alone.
            return None
        return RosterChange(version, self._version, entries, tuple(life for life, _ in dropped), self.epoch)

    def entry(self, life: int) -> TaskInfo:
        """Return the roster's entry of a life."""
        return self._joined[life]

    @property
    def left_in_all(self) -> int:
        """Number of tasks that have left, listed or not."""
        return self._left_in_all

    def live_peers(self) -> tuple[int, ...]:
        """Return the connections of the live tasks that are not away, in order of joining."""
        return tuple(live.peer for live in self._live.values() if live.peer is not None)

    def away(self) -> tuple[str, ...]:
        """Return the live tasks without a connection, in order of joining."""
        return tuple(task for task, live in self._live.items() if live.peer is None)

    def available(self, job: str) -> tuple[str, ...]:
        """Return the tasks of `job` that are live or still expected, by index."""
        return self._by_job().get(job, ())

    def jobs(self) -> tuple[str, ...]:
        """Return every job with a live or expected task."""
        return tuple(self._by_job())

    def _by_job(self) -> dict[str, tuple[str, ...]]:
        """Return the live or still expected tasks by job, sorted by index; cached until the roster changes."""
        if self._available is None:
            found: dict[str, list[str]] = {}
            for task in sorted({*self._live, *self._expected}, key=split_task_name):
                found.setdefault(split_task_name(task)[0], []).append(task)
            self._available = {job: tuple(tasks) for job, tasks in found.items()}
        return self._available

    def _excuse_pause(self, at_s: float) -> None:
        """Extend all deadlines by a pause of the coordinator, which could handle no heartbeat meanwhile."""
        last_s, self._ticked_at_s = self._ticked_at_s, at_s
        pause_s = at_s - last_s if last_s is not None else 0.0
        if pause_s > max(LONG_PAUSE_S, self._timeout_s / 2):
            # Not beyond the deadline that a heartbeat at this moment would set.
            latest_s = at_s + self._timeout_s
            for task, live in self._live.items():
                self._live[task] = replace(live, until_s=min(live.until_s + pause_s, latest_s))

    def _start(self, event: Started) -> list[MembershipCommand]:
        known = self._identity
        self._identity = _Identity(known.cluster or event.cluster, known.epoch + 1)
        self._records.put(_IDENTITY, self._identity)
        self._names_of.clear()
        for task, live in self._live.items():
            reason = f"it did not come back within {self._timeout_s:.1f} s of the coordinator's restart"
            self._live[task] = _LiveTask(live.life, None, event.at_s + self._timeout_s, reason)
        return []

    def _join(self, event: Joined) -> list[MembershipCommand]:
        split_task_name(event.task)
        if self.is_live(event.task, event.peer):
            return []
        refusal = self._refusal(event)
        if refusal is not None:
            return [refusal]
        held = self._live.get(event.task)
        if held is not None and self._is_same(event, held):
            return self._take_back(event, held)
        commands: list[MembershipCommand] = []
        if held is not None:
            commands = self._release([event.task], event.at_s, "it has started anew")
        self._changed(self._add(TaskInfo(event.task, event.address, event.at_s, incarnation=event.incarnation)))
        self._connect(event)
        return commands

    def _refusal(self, event: Joined) -> RefuseJoin | None:
        who, cluster = short_task_name(event.task), self._identity.cluster
        if event.cluster and event.cluster != cluster:
            return RefuseJoin(
                f"{who} is a task of cluster {event.cluster}, and this is the coordinator of {cluster or 'none'}; "
                "it was started without the state of the first, which `--state FILE` keeps",
                "TaskLost",
            )
        other = self._names_of.get(event.peer)
        if other is not None:
            return RefuseJoin(
                f"this connection has joined as {short_task_name(other)} and may not join as {who} too; "
                "open another connection"
            )
        held = self._live.get(event.task)
        if held is not None:
            if held.peer is None or self._is_same(event, held):
                return None
            there, here = (place.partition(";")[0] for place in (self._joined[held.life].address, event.address))
            return RefuseJoin(
                f"{who} is already live at {there}, so the one at {here} may not join; give it another index, or end "
                "the first"
            )
        for life in reversed(self._lives_of.get(event.task, [])):
            info = self._joined[life]
            if event.incarnation and info.incarnation == event.incarnation:
                text = f"{self._end_of(info)}; its work has gone to others, so it has to start anew"
                return RefuseJoin(text, "TaskLost")
        return None

    def _is_same(self, event: Joined, held: _LiveTask) -> bool:
        info = self._joined[held.life]
        return (info.incarnation, info.address) == (event.incarnation, event.address)

    def _take_back(self, event: Joined, held: _LiveTask) -> list[MembershipCommand]:
        """Reconnect the same member: the new connection replaces the old one."""
        commands: list[MembershipCommand] = []
        if held.peer is not None:
            del self._names_of[held.peer]
            commands = [EndConnection(held.peer, f"{short_task_name(event.task)} has come over another connection")]
        self._connect(event)
        return commands

    def _connect(self, event: Joined) -> None:
        self._names_of[event.peer] = event.task
        self._live[event.task] = replace(self._live[event.task], peer=event.peer)
        self._hear(event.task, event.at_s)

    def _hear(self, task: str, at_s: float) -> None:
        reason = f"no heartbeat for {self._timeout_s:.1f} s"
        self._live[task] = replace(self._live[task], until_s=at_s + self._timeout_s, reason=reason)

    def _add(self, info: TaskInfo) -> int:
        """List a task that has joined and return its life; it is away for now, unless its entry says that it left."""
        life, self._next_life = self._next_life, self._next_life + 1
        self._joined[life] = msgspec.structs.replace(info, life=life)
        self._joined_after[life] = self._version
        self._lives_of.setdefault(info.task, []).append(life)
        self._expected.pop(info.task, None)
        if info.left_at_s is None:
            self._live[info.task] = _LiveTask(life, None, info.joined_at_s, "")
        return life

    def _release(self, tasks: list[str], at_s: float, reason: str = "") -> list[MembershipCommand]:
        commands: list[MembershipCommand] = []
        for task in tasks:
            live = self._live.pop(task)
            why = reason or live.reason
            info = msgspec.structs.replace(self._joined[live.life], left_at_s=at_s, left=why)
            self._joined[live.life] = info
            self._left_in_all += 1
            self._changed(live.life)
            self._left.append(live.life)
            if len(self._left) > MOST_LEFT:
                self._drop(self._left.popleft())
            commands.append(ReleaseTask(task, live.life, why))
            if live.peer is not None:
                del self._names_of[live.peer]
                # It reached its deadline, so its connection may still be open.
                if not reason:
                    commands.append(EndConnection(live.peer, why))
        return commands

    def _drop(self, life: int) -> None:
        """Remove a life that has left from the list."""
        info = self._joined.pop(life)
        self._unpublished.pop(life, None)
        self._dropped.append(life)
        self._changed_at.pop(life, None)
        self._dropped_at.append((self._version, life, self._joined_after.pop(life)))
        if len(self._dropped_at) > MOST_LEFT:
            # Without this drop, the changes since an earlier version can no longer be listed.
            self._complete_at, *_ = self._dropped_at.popleft()
        lives = self._lives_of[info.task]
        lives.remove(life)
        if not lives:
            del self._lives_of[info.task]
        self._records.drop(f"{_LIFE}{life:012d}")

    def _changed(self, life: int) -> None:
        """Record that the entry of a life has changed."""
        self._available = None
        self._version += 1
        self._unpublished[life] = None
        self._changed_at.pop(life, None)
        # Removed and inserted again, so that the dict stays ordered by version.
        self._changed_at[life] = self._version
        self._records.put(_VERSION, _RosterVersion(self._version, self._left_in_all))
        self._records.put(f"{_LIFE}{life:012d}", self._joined[life])

    def _publish(self) -> PublishRoster:
        since, self._published = self._published, self._version
        lives = tuple(sorted(self._unpublished))
        self._unpublished.clear()
        dropped, self._dropped = tuple(self._dropped), []
        return PublishRoster(since, self._version, lives, dropped)

    def _end(self, life: int) -> float:
        return self._joined[life].left_at_s or 0.0

    @staticmethod
    def _end_of(info: TaskInfo) -> str:
        return f"{short_task_name(info.task)} left at {info.left_at_s or 0.0:.1f} s: {info.left}"


_IDENTITY = "identity"
_LIFE = "life/"
_VERSION = "roster version"
