"""What the parts of steps cost each task, from the totals that its process reports with each heartbeat.

Invariants: costs are differences of two heartbeats of one process, from the first one after a part has ended, so that
imports and the first compilation are not counted. They are kept when the task leaves, and a new process of the same
name replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflow.distributed.coordinator.coordinator_events import Command
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Received
from dflow.distributed.wire.messages.roster import Heartbeat
from dflow.distributed.wire.messages.status import PartCosts


class CostTotals(CoordinatorPart):
    """The costs in one cluster."""

    def __init__(self) -> None:
        #: For each task, its life, its first heartbeat with a part, and the newest one.
        self._heard: dict[str, tuple[int, Heartbeat, Heartbeat]] = {}

    def on_heartbeat(self, heartbeat: Heartbeat, received: Received) -> Sequence[Command]:
        """Take the totals of a task."""
        self.report(received.life, heartbeat)
        return []

    def status(self, core: CoordinatorCore) -> dict[str, Any]:
        """Return the costs by task."""
        return {"costs": self.totals()}

    def report(self, life: int, heartbeat: Heartbeat) -> None:
        """Note the totals of a task; its `life` differs from earlier tasks of the same name."""
        if not (heartbeat.steps and heartbeat.processor_s):
            return
        last, first, _ = self._heard.get(heartbeat.task, (life, heartbeat, heartbeat))
        self._heard[heartbeat.task] = (life, first if last == life else heartbeat, heartbeat)

    def totals(self) -> tuple[PartCosts, ...]:
        """Return the costs by task, without tasks that have ended no part between two heartbeats."""
        return tuple(
            PartCosts(
                task,
                newest.steps - first.steps,
                newest.processor_s - first.processor_s,
                newest.wakeups - first.wakeups,
            )
            for task, (_, first, newest) in self._heard.items()
            if newest.steps > first.steps
        )
