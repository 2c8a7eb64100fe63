"""Totals that each task reports with its heartbeats: traffic over each edge, and what the parts of steps cost.

Invariants:
- a newer report of traffic of a task replaces its last one. When a task leaves, its traffic is kept and added to that
  of its successor of the same name, so the sum over all edges never shrinks. The entry of one edge may shrink: a task's
  last report decides which of its edges have an entry, and which are summed as `OTHERS`;
- costs are differences of two heartbeats of one process, from the first one after a part has ended, so that imports and
  the first compilation are not counted. They are kept when the task leaves, and a new process of the same name replaces
  them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from dflow.distributed.coordinator.coordinator_events import Command
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Received
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.wire.messages.roster import EdgeTraffic, Heartbeat, summed_by_edge
from dflow.distributed.wire.messages.status import PartCosts

#: Most edges in a message; a graph may have more than fit into one.
EDGES_TOLD = 1000
OTHERS = "all other edges"


class TaskTotals(CoordinatorPart):
    """The traffic and the costs of steps that the tasks of one cluster reported."""

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        #: The newest traffic of each live task, by life, and the sum for the tasks that have left.
        self._traffic: dict[int, tuple[EdgeTraffic, ...]] = {}
        self._kept: tuple[EdgeTraffic, ...] = ()
        #: For each task, its life, its first heartbeat with a part, and the newest one.
        self._heard: dict[str, tuple[int, Heartbeat, Heartbeat]] = {}

    def on_heartbeat(self, heartbeat: Heartbeat, received: Received) -> Sequence[Command]:
        """Record the totals of a task."""
        life = received.life
        if heartbeat.traffic:
            self._traffic[life] = heartbeat.traffic
        if heartbeat.steps and heartbeat.processor_s:
            last, first, _ = self._heard.get(heartbeat.task, (life, heartbeat, heartbeat))
            self._heard[heartbeat.task] = (life, first if last == life else heartbeat, heartbeat)
        return []

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> Sequence[Command]:
        """Add the traffic of tasks that have left to the sum of those."""
        for one in left:
            self._kept = summed_by_edge((*self._kept, *self._traffic.pop(one.life, ())))
        return []

    def status(self) -> dict[str, Any]:
        """Return the largest traffic, in order of first report if it has few edges, and the costs by task.

        A task that has ended no part between two heartbeats has no costs.
        """
        traffic = (*self._kept, *(entry for entries in self._traffic.values() for entry in entries))
        costs = tuple(
            PartCosts(
                task,
                newest.steps - first.steps,
                newest.processor_s - first.processor_s,
                newest.wakeups - first.wakeups,
            )
            for task, (_, first, newest) in self._heard.items()
            if newest.steps > first.steps
        )
        return {"traffic": largest(summed_by_edge(traffic)), "costs": costs}


def largest(traffic: Sequence[EdgeTraffic], count: int = EDGES_TOLD) -> tuple[EdgeTraffic, ...]:
    """Return the `count` edges with the most bytes, and the others as one entry for each pair of tasks; or all."""
    known = [entry for entry in traffic if entry.edge != OTHERS]
    if len(known) <= count:
        return tuple(traffic)
    known.sort(key=lambda entry: entry.size_bytes, reverse=True)
    rest = [entry for entry in traffic if entry.edge == OTHERS] + known[count:]
    return (*known[:count], *summed_by_edge(replace(entry, edge=OTHERS) for entry in rest))
