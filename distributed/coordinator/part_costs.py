"""What the parts of steps cost each task, from the totals that its process reports with each heartbeat.

Invariants: costs are differences of two heartbeats of one process, from the first one after a part has ended, so that
imports and the first compilation are not counted. They are kept when the task leaves, and a new process of the same
name replaces them.
"""

from __future__ import annotations

from dflow.distributed.wire.messages.roster import Heartbeat
from dflow.distributed.wire.messages.status import PartCosts


class CostTotals:
    """The costs in one cluster."""

    def __init__(self) -> None:
        #: For each task, its life, its first heartbeat with a part, and the newest one.
        self._heard: dict[str, tuple[int, Heartbeat, Heartbeat]] = {}

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
