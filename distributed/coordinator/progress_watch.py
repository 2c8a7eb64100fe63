"""Health of tasks: detection of stalled ones, which are alive and busy by their heartbeats but end no step.

Invariants:
- a task is stalled when it has been busy for `stall_timeout_s` without ending a step, until it ends one or is idle; an
  idle task is never stalled;
- each stall is reported once when it begins, and once when it ends while the task is live.
"""

from __future__ import annotations

from msgspec.structs import replace

from dflow.distributed.wire.messages.roster import Heartbeat
from dflow.distributed.wire.messages.status import Health, TaskHealth
from dflow.tracing.devices.task_name import short_task_name


class ProgressWatch:
    """The live tasks of one cluster, by the number of their life."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._timeout_s = stall_timeout_s
        #: The newest heartbeat of each task that has sent one.
        self.health: dict[int, TaskHealth] = {}
        #: Of each busy task, the time since when it has been busy without progress.
        self._busy_since_s: dict[int, float] = {}

    def hear(self, life: int, at_s: float, heartbeat: Heartbeat, is_busy: bool) -> float | None:
        """Apply a heartbeat; return the duration of the stall that it ends, None if it ends none."""
        last = self.health.get(life)
        if last is not None and last.steps == heartbeat.steps and is_busy and life in self._busy_since_s:
            self.health[life] = replace(last, heard_at_s=at_s, doing=heartbeat.doing)
            return None
        self.health[life] = TaskHealth(heartbeat.task, at_s, heartbeat.steps, heartbeat.doing, None)
        if is_busy:
            self._busy_since_s[life] = at_s
        else:
            self._busy_since_s.pop(life, None)
        return None if last is None or last.stalled_since_s is None else at_s - last.stalled_since_s

    def leave(self, life: int) -> None:
        """Forget a task that has left."""
        self.health.pop(life, None)
        self._busy_since_s.pop(life, None)

    def tick(self, at_s: float) -> list[tuple[TaskHealth, float]]:
        """Return the tasks that have become stalled since the last call, each with the duration of its stall."""
        stalled = []
        for life, since_s in self._busy_since_s.items():
            health = self.health[life]
            if health.stalled_since_s is None and at_s - since_s >= self._timeout_s:
                self.health[life] = replace(health, stalled_since_s=since_s)
                stalled.append((self.health[life], at_s - since_s))
        return stalled


def describe_task(task: str, answer: Health) -> str:
    """Describe a task, such as "ps:0 (last heard 0.3 s ago, 12 steps ended, now idle)", or "ps:0 (has not joined)"."""
    name, health = short_task_name(task), answer.health
    if health is None:
        return f"{name} ({answer.absence.removeprefix(name).strip() or 'just joined'})"
    stalled_s = health.stalled_since_s
    stall = f", which has ended no step for {answer.now_s - stalled_s:.1f} s" if stalled_s is not None else ""
    heard = f"last heard {answer.now_s - health.heard_at_s:.1f} s ago"
    doing = f"at: {health.doing}" if health.doing else "idle"
    return f"{name} ({heard}, {health.steps} steps ended, now {doing}{stall})"
