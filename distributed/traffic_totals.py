"""How much has been sent over each edge, from totals that each task reports again and again.

Invariants: a newer report of a task replaces its last one; what a task had reported when it left is kept and is
added to what its successor of the same name reports, so the sum over all edges never shrinks. An entry of one edge may:
what a task reports last decides which of its edges are told by name, and which are among the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dflow.distributed.messages import EdgeTraffic

#: How many edges a message tells of; a graph may have more than fit into one.
EDGES_TOLD = 1000
OTHERS = "all other edges"


class TrafficTotals:
    """The traffic of one cluster."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[EdgeTraffic, ...]] = {}
        self._kept: tuple[EdgeTraffic, ...] = ()

    def report(self, life: int, totals: tuple[EdgeTraffic, ...]) -> None:
        """A task has sent so much since it started; `life` tells it from its predecessors of the same name."""
        if totals:
            self._newest[life] = totals

    def leave(self, life: int) -> None:
        """The task reports no more."""
        self._kept = _summed((*self._kept, *self._newest.pop(life, ())))

    def totals(self) -> tuple[EdgeTraffic, ...]:
        """One entry per edge and pair of tasks, in order of first report."""
        return _summed((*self._kept, *(entry for totals in self._newest.values() for entry in totals)))


def largest(traffic: Sequence[EdgeTraffic], count: int = EDGES_TOLD) -> tuple[EdgeTraffic, ...]:
    """The `count` edges over which most was sent; all others as one entry for each pair of tasks."""
    known = [entry for entry in traffic if entry.edge != OTHERS]
    if len(known) <= count:
        return tuple(traffic)
    known.sort(key=lambda entry: entry.size_bytes, reverse=True)
    rest = [entry for entry in traffic if entry.edge == OTHERS] + known[count:]
    return (*known[:count], *_summed(msgspec.structs.replace(entry, edge=OTHERS) for entry in rest))


def _summed(entries: Iterable[EdgeTraffic]) -> tuple[EdgeTraffic, ...]:
    sums: dict[tuple[str, str, str], EdgeTraffic] = {}
    for entry in entries:
        key = (entry.edge, entry.source, entry.destination)
        last = sums.get(key)
        sums[key] = (
            entry
            if last is None
            else msgspec.structs.replace(
                last, values=last.values + entry.values, size_bytes=last.size_bytes + entry.size_bytes
            )
        )
    return tuple(sums.values())
