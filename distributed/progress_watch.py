"""Which tasks are alive but stuck: they are heard, say that they are at work, and end no step.

Invariants:
- a task is stalled when it has been busy without ending a step for `stall_timeout_s`, and no longer once it ends one
  or is idle; to be idle is not to be stuck, however long;
- each stall is told once when it begins, and once when it ends while the task is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflow.distributed.messages import TaskHealth


@dataclass(frozen=True)
class StallBegan:
    """A task has made no progress since `since_s`."""

    task: str
    since_s: float
    doing: str


@dataclass(frozen=True)
class StallEnded:
    """A task that was stalled goes on, or is idle, after so long."""

    task: str
    lasted_s: float


@dataclass(frozen=True)
class _Seen:
    """A task: when it was heard, what it said, since when it is busy without progress, and whether that is a stall."""

    task: str
    heard_at_s: float
    steps: int
    doing: str
    is_busy: bool
    since_s: float
    is_stalled: bool


class ProgressWatch:
    """The live tasks of one cluster, each by the number of its life."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._timeout_s = stall_timeout_s
        self._seen: dict[int, _Seen] = {}

    def hear(self, life: int, task: str, at_s: float, steps: int, doing: str, is_busy: bool) -> list[StallEnded]:
        """A task said how many steps it has ended in all, and what it is at."""
        seen = self._seen.get(life)
        if seen is not None and seen.is_busy and is_busy and seen.steps == steps:
            self._seen[life] = replace(seen, heard_at_s=at_s, doing=doing)
            return []
        self._seen[life] = _Seen(task, at_s, steps, doing, is_busy, at_s, False)
        return [StallEnded(task, at_s - seen.since_s)] if seen is not None and seen.is_stalled else []

    def leave(self, life: int) -> None:
        """The task is there no longer."""
        self._seen.pop(life, None)

    def tick(self, at_s: float) -> list[StallBegan]:
        """The stalls that have begun by now."""
        began = []
        for life, seen in self._seen.items():
            if seen.is_busy and not seen.is_stalled and at_s - seen.since_s >= self._timeout_s:
                self._seen[life] = replace(seen, is_stalled=True)
                began.append(StallBegan(seen.task, seen.since_s, seen.doing))
        return began

    def health(self, life: int) -> TaskHealth | None:
        """What is known of a task; None before it was heard."""
        seen = self._seen.get(life)
        if seen is None:
            return None
        stalled_s = seen.since_s if seen.is_stalled else None
        return TaskHealth(seen.task, seen.heard_at_s, seen.steps, seen.doing, stalled_s)

    def all_health(self) -> tuple[TaskHealth, ...]:
        """What is known of each, in order of joining."""
        return tuple(health for life in sorted(self._seen) if (health := self.health(life)) is not None)
