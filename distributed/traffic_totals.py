"""How much has been sent over each edge, from totals that each task reports again and again.

Invariants: a newer report of a task replaces its last one; what a task had reported when it left is kept and is
added to what its successor of the same name reports, so totals never shrink.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dflow.distributed.messages import EdgeTraffic


class TrafficTotals:
    """The traffic of one cluster."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[EdgeTraffic, ...]] = {}
        self._kept: tuple[EdgeTraffic, ...] = ()

    def report(self, peer: int, totals: tuple[EdgeTraffic, ...]) -> None:
        """The task behind `peer` has sent so much since it started."""
        if totals:
            self._newest[peer] = totals

    def leave(self, peer: int) -> None:
        """The task behind `peer` reports no more."""
        self._kept = _summed((*self._kept, *self._newest.pop(peer, ())))

    def totals(self) -> tuple[EdgeTraffic, ...]:
        """One entry per edge and pair of tasks, in order of first report."""
        return _summed((*self._kept, *(entry for totals in self._newest.values() for entry in totals)))


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
