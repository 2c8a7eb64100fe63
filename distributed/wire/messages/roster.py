"""Membership of a cluster: tasks that join, are alive, and leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.message import Mark, Marked, Message, Notice, Request


class TaskInfo(msgspec.Struct, frozen=True):
    """A task of the cluster in one `life`, a number that no other life of any task shares.

    `left` is the reason why it left, empty while it is live. Times are in s since the coordinator's first start.
    """

    task: str
    address: str
    joined_at_s: float
    left_at_s: float | None = None
    left: str = ""
    incarnation: str = ""
    life: int = 0

    @property
    def process(self) -> str:
        """Identity of the process: `ab12` for its first incarnation `ab12` and for its third, `ab12.3`."""
        return self.incarnation.partition(".")[0]


class Roster(Marked, frozen=True):
    """Every task that has joined, except members that left long ago, and the tasks still `expected`.

    `version`  number of changes; a greater one is newer
    `cluster`  id of the cluster, the same as long as its coordinator keeps its state
    `epoch`    number of starts of the cluster's coordinator
    """

    tasks: tuple[TaskInfo, ...]
    expected: tuple[str, ...]
    version: int = 0
    cluster: str = ""
    epoch: int = 0


class RosterChange(Marked, Notice, frozen=True):
    """The changes of the roster from version `since` to `version`, and the newest `epoch`.

    Each of `entries` replaces the entry of the same life, or adds a task, which is no longer expected. The lives in
    `dropped` are no longer listed.
    """

    since: int
    version: int
    entries: tuple[TaskInfo, ...]
    dropped: tuple[int, ...] = ()
    epoch: int = 0


def changed_roster(roster: Roster, change: RosterChange) -> Roster:
    """Return the roster after the change."""
    tasks = {info.life: info for info in roster.tasks} | {info.life: info for info in change.entries}
    for life in change.dropped:
        tasks.pop(life, None)
    joined = {info.task for info in change.entries}
    expected = tuple(task for task in roster.expected if task not in joined)
    return msgspec.structs.replace(
        roster,
        tasks=tuple(tasks.values()),
        expected=expected,
        version=change.version,
        epoch=change.epoch,
        mark=change.mark,
    )


def change_between(earlier: Roster, later: Roster) -> RosterChange:
    """Return the change from `earlier` to `later`, two rosters of the same start of the same coordinator."""
    known = {info.life: info for info in earlier.tasks}
    entries = tuple(info for info in later.tasks if known.pop(info.life, None) != info)
    return RosterChange(earlier.version, later.version, entries, tuple(known), later.epoch, mark=later.mark)


class Packed(Message, frozen=True):
    """The message is the payload, encoded and compressed; if that is a roster, the receiver applies `change` to it."""

    change: RosterChange | None = None


class Join(Request[Roster | RosterChange], frozen=True):
    """Task `task` runs and listens at `address`; answered by `Roster`, and later by a `RosterChange` per change.

    `incarnation`  id of one life of the task: a task with the same one and the same address stays the same member
    `cluster`      id of the cluster that it was a member of, or empty; a coordinator of another cluster refuses it
    `since`        version of the roster that it has, or 0; if it is not 0, the answer may be a `RosterChange`
    `mark`         newest mark that it has seen; a coordinator whose state is older refuses it
    """

    speaker = "task"
    is_open = True

    task: str
    address: str
    incarnation: str = ""
    cluster: str = ""
    since: int = 0
    mark: Mark = Mark()


class EdgeTraffic(msgspec.Struct, frozen=True):
    """Values and bytes that a task has sent over one edge since it started, in `messages` messages."""

    edge: str
    source: str
    destination: str
    values: int
    size_bytes: int
    messages: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """Its edge and the two ends."""
        return self.edge, self.source, self.destination


def summed(rows: Sequence[EdgeTraffic]) -> EdgeTraffic:
    """Return the first row with the messages, values and bytes of all."""
    return msgspec.structs.replace(
        rows[0],
        values=sum(row.values for row in rows),
        size_bytes=sum(row.size_bytes for row in rows),
        messages=sum(row.messages for row in rows),
    )


def summed_by_edge(rows: Iterable[EdgeTraffic]) -> tuple[EdgeTraffic, ...]:
    """Return the sum of the rows of each edge with the same ends, in the order of the first ones."""
    by_key: dict[tuple[str, str, str], list[EdgeTraffic]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    return tuple(map(summed, by_key.values()))


class Heartbeat(Notice, frozen=True):
    """A task is alive.

    `traffic`  its totals since it started
    `steps`    number of parts of steps that it has ended since it started
    `doing`    short text on what it works on; empty when it is idle
    `processor_s`  time that all threads of its process have used the processor since its start, in s
    `wakeups`      see `TaskUsage`
    """

    speaker = "task"

    task: str
    traffic: tuple[EdgeTraffic, ...] = ()
    steps: int = 0
    doing: str = ""
    processor_s: float = 0.0
    wakeups: int = 0


class Announcement(Notice, frozen=True):
    """The coordinator's text about a task that is away or back, for the log of each task."""

    text: str


class Leave(Request[Ok], Notice, frozen=True):
    """A task leaves the cluster voluntarily."""

    speaker = "task"

    task: str
    reason: str
