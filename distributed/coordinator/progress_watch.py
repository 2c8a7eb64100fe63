"""Detection of stalled tasks: alive and busy by their heartbeats, but ending no step.

Invariants:
- a task is stalled when it has been busy for `stall_timeout_s` without ending a step, until it ends one or is idle; an
  idle task is never stalled;
- each stall is reported once when it begins, and once when it ends while the task is live.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflow.distributed.wire.messages.status import TaskHealth


@dataclass(frozen=True)
class StallBegan:
    """A task has made no progress since `since_s`."""

    task: str
    since_s: float
    doing: str


@dataclass(frozen=True)
class StallEnded:
    """A stalled task has ended a step or is idle; the stall lasted `lasted_s`."""

    task: str
    lasted_s: float


@dataclass(frozen=True)
class _WatchedTask:
    """A task: its newest heartbeat, the time since when it has been busy without progress, and if that is a stall."""

    task: str
    heard_at_s: float
    steps: int
    doing: str
    is_busy: bool
    since_s: float
    is_stalled: bool


class ProgressWatch:
    """The live tasks of one cluster, by the number of their life."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._timeout_s = stall_timeout_s
        self._seen: dict[int, _WatchedTask] = {}

    def hear(self, life: int, task: str, at_s: float, steps: int, doing: str, is_busy: bool) -> list[StallEnded]:
        """Apply a heartbeat: the steps that the task has ended since its start, and what it works on."""
        seen = self._seen.get(life)
        if seen is not None and seen.is_busy and is_busy and seen.steps == steps:
            self._seen[life] = replace(seen, heard_at_s=at_s, doing=doing)
            return []
        self._seen[life] = _WatchedTask(task, at_s, steps, doing, is_busy, at_s, False)
        return [StallEnded(task, at_s - seen.since_s)] if seen is not None and seen.is_stalled else []

    def leave(self, life: int) -> None:
        """Forget a task that has left."""
        self._seen.pop(life, None)

    def tick(self, at_s: float) -> list[StallBegan]:
        """Return the stalls that have begun since the last call."""
        began = []
        for life, seen in self._seen.items():
            if seen.is_busy and not seen.is_stalled and at_s - seen.since_s >= self._timeout_s:
                self._seen[life] = replace(seen, is_stalled=True)
                began.append(StallBegan(seen.task, seen.since_s, seen.doing))
        return began

    def health(self, life: int) -> TaskHealth | None:
        """Return the newest heartbeat of a task; None before the first."""
        seen = self._seen.get(life)
        if seen is None:
            return None
        stalled_s = seen.since_s if seen.is_stalled else None
        return TaskHealth(seen.task, seen.heard_at_s, seen.steps, seen.doing, stalled_s)

    def all_health(self) -> tuple[TaskHealth, ...]:
        """Return the newest heartbeat of each task, in order of joining."""
        return tuple(health for life in sorted(self._seen) if (health := self.health(life)) is not None)
