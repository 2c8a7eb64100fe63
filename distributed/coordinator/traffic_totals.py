"""Total traffic over each edge, from totals that each task reports repeatedly.

Invariants: a newer report of a task replaces its last one. When a task leaves, its totals are kept and added to those
of its successor of the same name, so the sum over all edges never shrinks. The entry of one edge may shrink: a task's
last report decides which of its edges have an entry, and which are summed as `OTHERS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from dflow.distributed.coordinator.coordinator_events import Command
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Received
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.wire.messages.roster import EdgeTraffic, Heartbeat

#: Most edges in a message; a graph may have more than fit into one.
EDGES_TOLD = 1000
OTHERS = "all other edges"


class TrafficTotals(CoordinatorPart):
    """The traffic of one cluster."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[EdgeTraffic, ...]] = {}
        self._kept: tuple[EdgeTraffic, ...] = ()

    def on_heartbeat(self, heartbeat: Heartbeat, received: Received) -> Sequence[Command]:
        """Take the totals of a task."""
        self.report(received.life, heartbeat.traffic)
        return []

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float, core: CoordinatorCore) -> Sequence[Command]:
        """Keep the totals of tasks that have left."""
        for one in left:
            self.leave(one.life)
        return []

    def status(self, core: CoordinatorCore) -> dict[str, Any]:
        """Return the largest totals."""
        return {"traffic": largest(self.totals())}

    def report(self, life: int, totals: tuple[EdgeTraffic, ...]) -> None:
        """Replace a task's totals since it started; its `life` differs from earlier tasks of the same name."""
        if totals:
            self._newest[life] = totals

    def leave(self, life: int) -> None:
        """Keep the totals of a task that left, which reports no more."""
        self._kept = _summed((*self._kept, *self._newest.pop(life, ())))

    def totals(self) -> tuple[EdgeTraffic, ...]:
        """Return one entry per edge and pair of tasks, in order of first report."""
        return _summed((*self._kept, *(entry for totals in self._newest.values() for entry in totals)))


def largest(traffic: Sequence[EdgeTraffic], count: int = EDGES_TOLD) -> tuple[EdgeTraffic, ...]:
    """Return the `count` edges with the most bytes; the others as one entry for each pair of tasks."""
    known = [entry for entry in traffic if entry.edge != OTHERS]
    if len(known) <= count:
        return tuple(traffic)
    known.sort(key=lambda entry: entry.size_bytes, reverse=True)
    rest = [entry for entry in traffic if entry.edge == OTHERS] + known[count:]
    return (*known[:count], *_summed(replace(entry, edge=OTHERS) for entry in rest))


def _summed(entries: Iterable[EdgeTraffic]) -> tuple[EdgeTraffic, ...]:
    sums: dict[tuple[str, str, str], EdgeTraffic] = {}
    for entry in entries:
        key = (entry.edge, entry.source, entry.destination)
        last = sums.get(key)
        if last is not None:
            entry = replace(
                last,
                values=last.values + entry.values,
                size_bytes=last.size_bytes + entry.size_bytes,
                messages=last.messages + entry.messages,
            )
        sums[key] = entry
    return tuple(sums.values())
