"""The roster of a cluster: its live tasks, and the tasks that left with their reasons; a pure function of events.

Invariants:
- at most one live task per name and per connection;
- a task that has joined is listed, and its `left` is set exactly when it is no longer live; of the tasks that have
  left, the last `MOST_LEFT` stay listed;
- a task that rejoins in the same incarnation stays the same member, and no task is notified; another incarnation is a
  new entry, and the old entry keeps its time and reason;
- a task that was declared dead may not rejoin in the same incarnation while it is listed: its work went to others;
- every change of the roster makes its next version, and is published once: immediately while the cluster is small,
  else with the other changes of a tick, so that N joins do not send N messages to each of N tasks. A death is always
  published immediately: a task knows of it before it gets an answer that depends on it;
- after a restart the members are those of before, away until they rejoin;
- a pause of the coordinator itself does not count as a task's silence;
- a holder, a task that holds state of the cluster, is live until `holder_timeout_s` after its last sign of life. Past
  the deadline of other tasks it is away: that is announced to all tasks once, and its return too.

A task is live from its Join until its Leave, until `heartbeat_timeout_s` without a heartbeat, or until `rejoin_s` after
its connection ended. When another process joins under the name of a task without a connection, that task has left. No
clock is read: events carry the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

import msgspec

from dflow.distributed.coordinator.coordinator_events import Broadcast, Disconnect, Log
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.roster import Announcement, Join, Roster, RosterChange, TaskInfo
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
class ReleaseTask:
    """Release what the task held in this life: it has left."""

    task: str
    life: int
    reason: str

    @property
    def described(self) -> str:
        """The end as a sentence, for errors."""
        return f"{short_task_name(self.task)} has left: {self.reason}"


MembershipCommand = ReleaseTask | Disconnect | Broadcast | Log


@dataclass(frozen=True)
class _LiveTask:
    """A live task.

    `life`        number of its life
    `peer`        its connection; None if it has none
    `until_s`     its deadline, after which it is declared dead, or away if it is a holder
    `reason`      reason why it has left, or is away, after its deadline
    `heard_at_s`  time of its last sign of life
    `is_away`     whether it was announced as away
    """

    life: int
    peer: int | None
    until_s: float
    reason: str
    heard_at_s: float
    is_away: bool = False


class ClusterIdentity(msgspec.Struct, frozen=True):
    """Id of the cluster, and number of starts (`epoch`) of its coordinator."""

    cluster: str = ""
    epoch: int = 0


class Membership:
    """The tasks of one cluster, kept in `records`.

    `jobs`                 number of expected tasks by job
    `heartbeat_timeout_s`  a task without a heartbeat for this time has left, unless it is a holder
    `rejoin_s`             a task without a connection for this time has left, unless it is a holder
    `holder_timeout_s`     a holder without a heartbeat for this time has left
    """

    def __init__(
        self,
        records: DurableRecords,
        jobs: Mapping[str, int],
        heartbeat_timeout_s: float = 10.0,
        rejoin_s: float = 1.0,
        holder_timeout_s: float = 60.0,
    ) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._holder_timeout_s = holder_timeout_s
        self._rejoin_s = rejoin_s
        self._records = records
        #: By life, in order of joining.
        self._joined: dict[int, TaskInfo] = {}
        self._next_life = 0
        self._live: dict[str, _LiveTask] = {}
        self._names_of: dict[int, str] = {}
        self._lives_of: dict[str, list[int]] = {}
        self._expected = dict.fromkeys(task_name(job, index) for job, count in jobs.items() for index in range(count))
        self.identity = records.load_one(_IDENTITY, ClusterIdentity())
        counted = records.load_one(_VERSION, {"version": 0, "left": 0})
        self.version = self._published = counted["version"]
        self.left_in_all = counted["left"]
        self._ticked_at_s: float | None = None
        #: Whether a death is not published yet.
        self._has_death = False
        self._available: dict[str, tuple[str, ...]] | None = None
        #: The version before each listed life joined.
        self._joined_after: dict[int, int] = {}
        for key, info in records.load(_LIFE, TaskInfo):
            # A life keeps its number, which `_add` takes from `_next_life`.
            self._next_life = int(key)
            self._add(info)
        ends = [(info.left_at_s, life) for life, info in self._joined.items() if info.left_at_s is not None]
        #: The listed lives that have left, oldest end first.
        self._left = deque(life for _, life in sorted(ends))
        #: By life, the version that last changed it, oldest first; `_dropped_at` has for each dropped life the versions
        #: of its drop and before its joining. Both are complete after version `_complete_at`.
        self._changed_at: dict[int, int] = {}
        self._dropped_at: deque[tuple[int, int, int]] = deque()
        self._complete_at = self.version

    def start(self, at_s: float, cluster: str) -> None:
        """Count a start of the coordinator; a new cluster gets the id `cluster`.

        The live tasks of the records are away, and have `heartbeat_timeout_s` to rejoin.
        """
        self.identity = ClusterIdentity(self.identity.cluster or cluster, self.identity.epoch + 1)
        self._records.put(_IDENTITY, self.identity)
        reason = f"it did not come back within {self._timeout_s:.1f} s of the coordinator's restart"
        for task, live in self._live.items():
            self._live[task] = replace(live, until_s=at_s + self._timeout_s, reason=reason, heard_at_s=at_s)

    def join(self, at_s: float, peer: int, join: Join) -> list[MembershipCommand] | Failure:
        """Take in a task over the connection `peer`, or take it back; return a Failure if it may not join.

        Another process under the name of a task without a connection replaces it: the earlier one has left.
        """
        if self.is_live(join.task, peer):
            return []
        refusal = self._refusal(peer, join)
        if refusal is not None:
            return refusal
        commands: list[MembershipCommand] = []
        held = self._live.get(join.task)
        if held is not None and self._is_same(join, held):
            if held.peer is not None:
                del self._names_of[held.peer]
                reason = f"{short_task_name(join.task)} has come over another connection"
                commands = [Disconnect(held.peer, reason)]
        else:
            if held is not None:
                commands = self._release([join.task], at_s, "it was started again")
            self._changed(self._add(TaskInfo(join.task, join.address, at_s, incarnation=join.incarnation)))
        self._names_of[peer] = join.task
        self._live[join.task] = replace(self._live[join.task], peer=peer)
        return [*commands, *self.hear(at_s, join.task), *self._news()]

    def hear(self, at_s: float, task: str) -> list[Log | Broadcast]:
        """Extend the deadline of a live task, and announce its return if it was announced as away."""
        live, reason = self._live[task], f"no heartbeat for {self._timeout_s:.1f} s"
        until_s = at_s + self._timeout_s
        self._live[task] = replace(live, until_s=until_s, reason=reason, heard_at_s=at_s, is_away=False)
        if not live.is_away:
            return []
        return self._announce(task, f"{short_task_name(task)} is back after {at_s - live.heard_at_s:.1f} s")

    def leave(self, at_s: float, task: str, reason: str) -> list[MembershipCommand]:
        """Record that a live task has left voluntarily, for `reason`."""
        return [*self._release([task], at_s, reason), *self._news()]

    def lose(self, at_s: float, peer: int, reason: str) -> None:
        """Record the end of a connection: its task, if it has one, is away, and has `rejoin_s` to rejoin."""
        task = self._names_of.pop(peer, None)
        if task is not None:
            live = self._live[task]
            until_s = min(live.until_s, at_s + self._rejoin_s)
            self._live[task] = replace(live, peer=None, until_s=until_s, reason=live.reason if live.is_away else reason)

    def tick(self, at_s: float, holds_state: Callable[[str], bool] = lambda task: False) -> list[MembershipCommand]:
        """End the lives past their deadline, or announce a holder as away; publish the changes that wait for a tick.

        `holds_state`  whether a live task is a holder
        """
        self._excuse_pause(at_s)
        late = [task for task, live in self._live.items() if at_s >= live.until_s]
        away = [task for task in late if at_s < self._lease_end_s(task) and holds_state(task)]
        announced = [command for task in away for command in self._announce_absence(at_s, task)]
        gone = [task for task in late if task not in away]
        return [*announced, *self._release(gone, at_s), *self._news(is_tick=True)]

    def _lease_end_s(self, task: str) -> float:
        return self._live[task].heard_at_s + self._holder_timeout_s

    def _announce_absence(self, at_s: float, task: str) -> list[Log | Broadcast]:
        """Announce that a holder is away, unless that was done."""
        live = self._live[task]
        if live.is_away:
            return []
        limit = f"{self._holder_timeout_s:g} s without a sign of life"
        self._live[task] = replace(live, is_away=True, reason=f"{live.reason}, and {limit}")
        return self._announce(
            task,
            f"{short_task_name(task)} is away since {at_s - live.heard_at_s:.1f} s: {live.reason}; it holds variables "
            f"or queues, so steps wait for it up to {limit}, for another {self._lease_end_s(task) - at_s:.1f} s",
        )

    def _announce(self, task: str, text: str) -> list[Log | Broadcast]:
        """Return the commands to log `text` here and on all tasks but `task`."""
        own = self._live[task].peer
        return [Log(text), Broadcast(tuple(peer for peer in self.live_peers() if peer != own), Announcement(text))]

    def _news(self, *, is_tick: bool = False) -> list[Broadcast]:
        """Return the changes of the roster since the last call, for all live tasks; none while they are not due."""
        if self.version == self._published or not (is_tick or self._has_death or len(self._live) <= PUBLISH_AT_ONCE):
            return []
        self._has_death = False
        news = self.changes_since(self._published) or self.roster()
        self._published = self.version
        return [Broadcast(self.live_peers(), news)]

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
        cluster, epoch = self.identity.cluster, self.identity.epoch
        return Roster(tuple(self._joined.values()), tuple(self._expected), self.version, cluster, epoch)

    def changes_since(self, version: int) -> RosterChange | None:
        """Return the changes of the roster after `version`; None if they are no longer all known."""
        if not self._complete_at <= version <= self.version:
            return None
        newer = takewhile(lambda change: change[1] > version, reversed(self._changed_at.items()))
        # By life, the order of joining, so that a receiver's roster has the same order as this one.
        entries = tuple(self._joined[life] for life in sorted(life for life, _ in newer))
        dropped = [(life, before) for at, life, before in self._dropped_at if at > version]
        if any(before >= version for _, before in dropped):
            # The task joined and left since: a receiver that still expects it learns that from a whole roster alone.
            return None
        return RosterChange(version, self.version, entries, tuple(life for life, _ in dropped), self.identity.epoch)

    def live_peers(self) -> tuple[int, ...]:
        """Return the connections of the live tasks, in order of joining."""
        return tuple(live.peer for live in self._live.values() if live.peer is not None)

    def connections(self) -> dict[str, int | None]:
        """Return the connections of the live tasks, by task; None for tasks that are away."""
        return {task: live.peer for task, live in self._live.items()}

    def away(self) -> tuple[str, ...]:
        """Return the live tasks that were announced as away, or have no connection, in order of joining."""
        return tuple(task for task, live in self._live.items() if live.is_away or live.peer is None)

    def by_job(self) -> Mapping[str, tuple[str, ...]]:
        """Return the live or still expected tasks by job, sorted by index; cached until the roster changes."""
        if self._available is None:
            found: dict[str, list[str]] = {}
            for task in sorted({*self._live, *self._expected}, key=split_task_name):
                found.setdefault(split_task_name(task)[0], []).append(task)
            self._available = {job: tuple(tasks) for job, tasks in found.items()}
        return self._available

    def coming(self, job: str, at_s: float, within_s: float) -> tuple[str, ...]:
        """Return the tasks of the job that are live, expected, or left by a fault less than `within_s` ago."""
        last = [self._joined[lives[-1]] for task, lives in self._lives_of.items() if split_task_name(task)[0] == job]
        lost = [
            info.task
            for info in last
            if info.left_at_s is not None and info.left not in NORMAL_ENDS and at_s - info.left_at_s < within_s
        ]
        return (*self.by_job().get(job, ()), *lost)

    def _excuse_pause(self, at_s: float) -> None:
        """Extend all deadlines if the coordinator paused since the last tick, and could handle no heartbeat."""
        last_s, self._ticked_at_s = self._ticked_at_s, at_s
        pause_s = at_s - last_s if last_s is not None else 0.0
        if pause_s > max(LONG_PAUSE_S, self._timeout_s / 2):
            # Not beyond the deadline that a heartbeat at this moment would set.
            latest_s = at_s + self._timeout_s
            for task, live in self._live.items():
                until_s, heard_at_s = min(live.until_s + pause_s, latest_s), min(live.heard_at_s + pause_s, at_s)
                self._live[task] = replace(live, until_s=until_s, heard_at_s=heard_at_s)

    def _refusal(self, peer: int, join: Join) -> Failure | None:
        name, cluster = short_task_name(join.task), self.identity.cluster
        if join.cluster and join.cluster != cluster:
            return Failure(
                "ConfigError",  # not a loss, after which a parameter task would join again
                f"{name} is a task of cluster {join.cluster}, and this is the coordinator of {cluster or 'none'}; "
                "it was started without the state of the first, which `--state FILE` keeps",
            )
        other = self._names_of.get(peer)
        if other is not None:
            return Failure(
                "RemoteError",
                f"this connection has joined as {short_task_name(other)} and may not join as {name} too; "
                "open another connection",
            )
        held = self._live.get(join.task)
        if held is not None:
            if held.peer is None or self._is_same(join, held):
                return None
            there, here = (address.partition(";")[0] for address in (self._joined[held.life].address, join.address))
            return Failure(
                "RemoteError",
                f"{name} is already live at {there}, so the one at {here} may not join; give it another index, or end "
                "the first",
            )
        for life in reversed(self._lives_of.get(join.task, [])):
            info = self._joined[life]
            if join.incarnation and info.incarnation == join.incarnation:
                text = f"{self._end_of(info)}; its work has gone to others, so it has to start anew"
                return Failure("TaskLost", text)
        return None

    def _is_same(self, join: Join, held: _LiveTask) -> bool:
        info = self._joined[held.life]
        return (info.incarnation, info.address) == (join.incarnation, join.address)

    def _add(self, info: TaskInfo) -> int:
        """List a task that has joined and return its life; it is away for now, unless its entry says that it left."""
        life, self._next_life = self._next_life, self._next_life + 1
        self._joined[life] = msgspec.structs.replace(info, life=life)
        self._joined_after[life] = self.version
        self._lives_of.setdefault(info.task, []).append(life)
        self._expected.pop(info.task, None)
        if info.left_at_s is None:
            self._live[info.task] = _LiveTask(life, None, info.joined_at_s, "", info.joined_at_s)
        return life

    def _release(self, tasks: list[str], at_s: float, reason: str = "") -> list[MembershipCommand]:
        commands: list[MembershipCommand] = []
        for task in tasks:
            live = self._live.pop(task)
            why = reason or live.reason
            info = msgspec.structs.replace(self._joined[live.life], left_at_s=at_s, left=why)
            self._joined[live.life] = info
            self._has_death |= why not in NORMAL_ENDS
            self.left_in_all += 1
            self._changed(live.life)
            self._left.append(live.life)
            if len(self._left) > MOST_LEFT:
                self._drop(self._left.popleft())
            commands.append(ReleaseTask(task, live.life, why))
            if live.peer is not None:
                del self._names_of[live.peer]
                # It reached its deadline, so its connection may still be open.
                if not reason:
                    commands.append(Disconnect(live.peer, why))
        return commands

    def _drop(self, life: int) -> None:
        """Remove a life that has left from the list and the records."""
        info = self._joined.pop(life)
        self._changed_at.pop(life, None)
        self._dropped_at.append((self.version, life, self._joined_after.pop(life)))
        if len(self._dropped_at) > MOST_LEFT:
            # Without this drop, the changes since an earlier version can no longer be listed.
            self._complete_at, *_ = self._dropped_at.popleft()
        lives = self._lives_of[info.task]
        lives.remove(life)
        if not lives:
            del self._lives_of[info.task]
        self._records.drop(f"{_LIFE}{life:012d}")

    def _changed(self, life: int) -> None:
        """Make the next version of the roster, after a change of the entry of a life."""
        self._available = None
        self.version += 1
        self._changed_at.pop(life, None)
        # Removed and inserted again, so that the dict stays ordered by version.
        self._changed_at[life] = self.version
        self._records.put(_VERSION, {"version": self.version, "left": self.left_in_all})
        self._records.put(f"{_LIFE}{life:012d}", self._joined[life])

    @staticmethod
    def _end_of(info: TaskInfo) -> str:
        return f"{short_task_name(info.task)} left at {info.left_at_s or 0.0:.1f} s: {info.left}"


_IDENTITY = "identity"
_LIFE = "life/"
_VERSION = "roster version"
