"""Health of tasks: detection of stalled ones, which are alive and busy by their heartbeats but end no step.

Invariants:
- a task is stalled when it has been busy for `stall_timeout_s` without ending a step, until it ends one or is idle; an
  idle task is never stalled;
- each stall is reported once when it begins, and once when it ends while the task is live.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, Log
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Notices, Received, Requests
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.observing import DumpEvents
from dflow.distributed.wire.messages.roster import Heartbeat
from dflow.distributed.wire.messages.status import GetHealth, Health, TaskHealth
from dflow.tracing.devices.task_name import short_task_name

#: Least time between two requests that all tasks dump their events, in s.
DUMP_PAUSE_S = 5.0


class ProgressWatch(CoordinatorPart):
    """Detects the stalled tasks of one cluster, by their heartbeats."""

    requests: ClassVar[Requests[ProgressWatch]] = HandlerTable()
    notices: ClassVar[Notices[ProgressWatch]] = HandlerTable()

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        self._members = core.members
        self._dumped_at_s: float | None = None
        self._timeout_s = core.settings.stall_timeout_s
        #: The newest heartbeat of each task that has sent one.
        self.health: dict[int, TaskHealth] = {}
        #: Of each busy task, the time since when it has been busy without progress.
        self._busy_since_s: dict[int, float] = {}

    def status(self) -> dict[str, Any]:
        """Return the newest heartbeat of each live task."""
        return {"health": tuple(health for _, health in sorted(self.health.items()))}

    @requests.handles(GetHealth)
    def _get_health(self, request: GetHealth, received: Received) -> Health:
        return self._health_of(request.task, received.at_s)

    @notices.handles(DumpEvents)
    def _pass_on_dump(self, message: DumpEvents, received: Received) -> list[Command]:
        # Tools may send it to tasks; here it is taken from the task that it names.
        is_its_own = self._members.is_live(message.task, received.peer)
        return self._ask_for_dumps(received.at_s, message.why, received.peer) if is_its_own else []

    def on_heartbeat(self, heartbeat: Heartbeat, received: Received) -> list[Command]:
        """Record a heartbeat, and log the end of a stall."""
        is_busy = bool(heartbeat.doing) or any(part.holds_work(heartbeat.task) for part in self._core.parts)
        stall_s = self.hear(received.life, received.at_s, heartbeat, is_busy)
        return [] if stall_s is None else [Log(f"{short_task_name(heartbeat.task)} goes on after {stall_s:.1f} s")]

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> Sequence[Command]:
        """Forget tasks that have left."""
        for one in left:
            self.health.pop(one.life, None)
            self._busy_since_s.pop(one.life, None)
        return []

    def on_tick(self, at_s: float) -> list[Command]:
        """Log the tasks that have become stalled, and have all tasks dump their events."""
        parts = self._core.parts
        texts = [
            f"{short_task_name(stalled.task)} is alive and has ended no step for {stall_s:.1f} s; it is at: "
            + "; it holds ".join(filter(None, [stalled.doing, *(part.work_of(stalled.task) for part in parts)]))
            for stalled, stall_s in self.tick(at_s)
        ]
        dumps = self._ask_for_dumps(at_s, texts[0]) if texts else []
        return [*(Log(text, "stalled") for text in texts), *dumps]

    def _ask_for_dumps(self, at_s: float, why: str, asker: int | None = None) -> list[Command]:
        """Have all live tasks but `asker` dump their newest events, unless they did so within `DUMP_PAUSE_S`."""
        if self._dumped_at_s is not None and at_s - self._dumped_at_s < DUMP_PAUSE_S:
            return []
        self._dumped_at_s = at_s
        return [Broadcast(tuple(peer for peer in self._members.live_peers() if peer != asker), DumpEvents(why))]

    def describe(self, task: str, at_s: float) -> str:
        """Describe a task, for errors."""
        return describe_task(task, self._health_of(task, at_s))

    def doing(self, task: str) -> str:
        """Describe what a task works on; empty if nothing is known."""
        known = self._health_of(task, 0.0).health
        return known.doing if known is not None else ""

    def _health_of(self, task: str, at_s: float) -> Health:
        members = self._members
        if not members.is_there(task):
            return Health(at_s, None, members.absence(task))
        return Health(at_s, self.health.get(members.life(task)), "")

    def hear(self, life: int, at_s: float, heartbeat: Heartbeat, is_busy: bool) -> float | None:
        """Record a heartbeat; return the duration of the stall that it ends, None if it ends none."""
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
