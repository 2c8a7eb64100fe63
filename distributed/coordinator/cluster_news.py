"""The newest events of a cluster, for people: tasks that join and leave, and what the coordinator logs.

They are not durable. After a restart of the coordinator the joins and ends of the listed tasks are reported again, by
its records. Invariant: at most `MOST_EVENTS` are kept, with at most `LONGEST_TEXT` characters each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from dflow.distributed.coordinator.coordinator_events import Command, Log
from dflow.distributed.coordinator.membership import NORMAL_ENDS, Membership
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.distributed.wire.messages.status import ClusterEvent, ClusterEvents, GetEvents
from dflow.tracing.devices.task_name import short_task_name

MOST_EVENTS = 500
LONGEST_TEXT = 500


class ClusterNews:
    """The newest events of the cluster with the members `membership`."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._kept: deque[ClusterEvent] = deque(maxlen=MOST_EVENTS)
        self._newest = 0
        self._version = -1
        #: The listed lives, by number.
        self._known: dict[int, TaskInfo] = {}

    def note(self, at_s: float, commands: Iterable[Command]) -> None:
        """Record the changes of the membership since the last call, and the logs among the commands."""
        if self._version != self._membership.version:
            self._record_members()
        for command in commands:
            if isinstance(command, Log):
                self.add(at_s, command.kind, "", command.text)

    def since(self, request: GetEvents) -> ClusterEvents:
        """Return the kept events after number `since`; all of them if the coordinator has restarted since `start`."""
        identity = self._membership.identity
        start = f"{identity.cluster}/{identity.epoch}"
        since = request.since if request.start == start else 0
        return ClusterEvents(start, self._newest, tuple(event for event in self._kept if event.number > since))

    def _record_members(self) -> None:
        change = self._membership.changes_since(self._version) if self._version >= 0 else None
        if change is None:
            entries = self._membership.roster().tasks
            listed = {info.life for info in entries}
            self._known = {life: info for life, info in self._known.items() if life in listed}
        else:
            entries = change.entries
            for life in change.dropped:
                self._known.pop(life, None)
        self._version = self._membership.version
        names = {info.task for info in self._known.values()}
        found: list[tuple[float, str, str, str]] = []
        for info in entries:
            before = self._known.get(info.life)
            if before is None and info.task in names:
                found.append((info.joined_at_s, "restarted", info.task, "joined again, after it had left"))
            elif before is None:
                found.append((info.joined_at_s, "joined", info.task, "joined"))
            if info.left_at_s is not None and (before is None or before.left_at_s is None):
                kind = "finished" if info.left in NORMAL_ENDS else "left"
                found.append((info.left_at_s, kind, info.task, f"left: {info.left or 'no reason given'}"))
            self._known[info.life] = info
            names.add(info.task)
        for at_s, kind, task, text in sorted(found, key=lambda one: one[0]):
            self.add(at_s, kind, task, f"{short_task_name(task)} {text}")

    def add(self, at_s: float, kind: str, task: str, text: str) -> None:
        """Record an event, with its text cut to `LONGEST_TEXT`."""
        self._newest += 1
        self._kept.append(ClusterEvent(self._newest, at_s, kind, task, text[:LONGEST_TEXT]))
