"""Join nodes into units: a node that is too small to be worth a transfer is joined with a neighbour.

A join never makes a cycle, and adds no large waits. Along a chain two nodes are joined if one is small. If a value has
several users, only a small user joins its producer. If a node takes several values, only a small producer joins it.
Reads of variables need nothing and take no time, so they are left out. Nodes with different choices of devices are
never joined. Baechi's co-placement (Jeon et al. 2020) is similar.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dflow.tracing.ir.graph import Graph

#: A node is small if it takes less than this part of the time of all nodes.
SMALL = 1 / 400
#: Two neighbours of a chain are joined if together they take less than this part of the time of all nodes.
SMALL_CHAIN = 1 / 16
#: If more units than this are left, the limit for small nodes is doubled.
MOST_UNITS = 150


def coarsened(
    graph: Graph, seconds: Sequence[float], kinds: Sequence[object], small_s: float
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the nodes of each unit; the units are in an order that respects every use and `after`.

    seconds  time of each node, by a first estimate
    kinds    nodes of different kinds (such as stated devices) are never joined, nor are nodes of kind None
    small_s  nodes that take less than this are small, even if all nodes take little time
    """
    small = max(small_s, sum(seconds) * SMALL)
    while True:
        groups = _Groups(graph, seconds, kinds)
        groups.join(small, chains_only=True)
        groups.join(small, chains_only=False)
        if len(groups.members) <= MOST_UNITS or small > sum(seconds):
            return groups.in_order()
        small *= 2


class _Groups:
    """Groups of nodes, each known by the index of one node; `needs` and `needed_by` are the groups around each."""

    def __init__(self, graph: Graph, seconds: Sequence[float], kinds: Sequence[object]) -> None:
        self._kinds, self._cost = kinds, list(seconds)
        self.members = {number: [number] for number in range(len(graph.nodes))}
        self._needs: dict[int, set[int]] = {number: set() for number in self.members}
        self._needed_by: dict[int, set[int]] = {number: set() for number in self.members}
        #: A chain of less than this time is joined, since a cut of it would gain little.
        self._small_chain = sum(seconds) * SMALL_CHAIN
        #: By group, the time that joins add to waits of other groups.
        self._extra = [0.0] * len(seconds)
        #: Nodes that cost nothing and need nothing, which are never joined.
        self._sources: list[int] = []
        number_of = {value: number for number, node in enumerate(graph.nodes) for value in node.outputs}
        for number, node in enumerate(graph.nodes):
            for earlier in {number_of.get(value, number) for value in (*node.values, *node.after)} - {number}:
                if earlier in self.members:
                    self._needs[number].add(earlier)
                    self._needed_by[earlier].add(number)
            if not self._needs[number] and not seconds[number]:
                self._sources.append(number)
                del self.members[number]

    def join(self, small: float, *, chains_only: bool) -> None:
        """Join groups until no more can be joined."""
        todo = sorted(self.members, reverse=True)
        while todo:
            one = todo.pop()
            if one not in self.members:
                continue
            pairs = [(one, later) for later in sorted(self._needed_by[one])]
            pairs += [(earlier, one) for earlier in sorted(self._needs[one])]
            for earlier, later in pairs:
                if (added := self._added_wait(earlier, later, small, chains_only)) is not None:
                    self._extra[earlier] += self._extra[later] + added
                    todo += sorted(self._unite(earlier, later), reverse=True)
                    break

    def _added_wait(self, earlier: int, later: int, small: float, chains_only: bool) -> float | None:
        """Return the time that a join would add to waits of other groups; None if the two are not to be joined."""
        if self._kinds[earlier] is None or self._kinds[earlier] != self._kinds[later]:
            return None
        one, other = self._cost[earlier], self._cost[later]
        is_only_need, is_only_use = self._needs[later] == {earlier}, self._needed_by[earlier] == {later}
        if is_only_need and is_only_use:
            return 0.0 if min(one, other) < small or one + other < self._small_chain else None
        if chains_only or not (is_only_need or is_only_use):
            return None
        # Others that need `earlier` would wait for `later` too, or `earlier` for the others that `later` needs.
        added = other if is_only_need else one
        return added if added + self._extra[earlier] + self._extra[later] < small else None

    def _unite(self, kept: int, gone: int) -> set[int]:
        """Make the group `gone` a part of `kept`, which it needs; return `kept` and its neighbours."""
        self.members[kept] += self.members.pop(gone)
        self._cost[kept] += self._cost[gone]
        for there, back in ((self._needs, self._needed_by), (self._needed_by, self._needs)):
            for other in there[gone] - {kept}:
                back[other].add(kept)
            for other in there[gone]:
                back[other].discard(gone)
            there[kept] = (there[kept] | there.pop(gone)) - {gone, kept}
        return {kept, *self._needs[kept], *self._needed_by[kept]}

    def in_order(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups in topological order; of several possible next ones, the one with the first node."""
        waits = {group: len(self._needs[group]) for group in self.members}
        ready = [group for group, count in waits.items() if not count]
        heapq.heapify(ready)
        found: list[tuple[int, ...]] = [(source,) for source in self._sources]
        while ready:
            group = heapq.heappop(ready)
            found.append(tuple(sorted(self.members[group])))
            for later in self._needed_by[group]:
                waits[later] -= 1
                if not waits[later]:
                    heapq.heappush(ready, later)
        assert len(found) == len(self.members) + len(self._sources)
        return tuple(found)
