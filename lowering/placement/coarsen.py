"""Join nodes into units: a node that is too small to be worth a transfer is joined with a neighbour.

A join never makes a cycle, and adds no large waits. Along a chain two nodes are joined if one is small. If a value has
several users, only a small user joins its producer. If a node takes several values, only a small producer joins it.
Reads of variables need nothing and take no time, so they are left out. Nodes with different choices of devices are
never joined. Baechi's co-placement (Jeon et al. 2020) is similar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass
class _Groups:
    graph: Graph
    seconds: Sequence[float]
    kinds: Sequence[object]
    members: dict[int, list[int]] = field(init=False)
    needs: dict[int, set[int]] = field(init=False)
    needed_by: dict[int, set[int]] = field(init=False)
    #: Nodes that cost nothing and need nothing, which are never joined.
    sources: set[int] = field(init=False)
    #: A chain of less than this time is joined, since a cut of it would gain little.
    small_chain: float = field(init=False)
    #: By group, the time that joins add to waits of other groups.
    extra: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        number_of = {value: number for number, node in enumerate(self.graph.nodes) for value in node.outputs}
        self.members = {number: [number] for number in range(len(self.graph.nodes))}
        self.needs = {number: set() for number in self.members}
        self.needed_by = {number: set() for number in self.members}
        self.extra = dict.fromkeys(self.members, 0.0)
        self._cost = dict(enumerate(self.seconds))
        self.sources = set()
        self.small_chain = sum(self.seconds) * SMALL_CHAIN
        for number, node in enumerate(self.graph.nodes):
            for value in (*node.values, *node.after):
                earlier = number_of.get(value)
                if earlier is not None and earlier != number and earlier not in self.sources:
                    self.needs[number].add(earlier)
                    self.needed_by[earlier].add(number)
            if not self.needs[number] and not self.seconds[number]:
                self.sources.add(number)
                del self.members[number], self.needs[number], self.needed_by[number]

    def join(self, small: float, *, chains_only: bool) -> None:
        """Join groups until no more can be joined."""
        todo = sorted(self.members, reverse=True)
        while todo:
            one = todo.pop()
            if one not in self.members:
                continue
            partner = self._partner(one, small, chains_only)
            if partner is not None:
                near = self._unite(*partner)
                todo += sorted(near, reverse=True)

    def _partner(self, one: int, small: float, chains_only: bool) -> tuple[int, int] | None:
        for later in sorted(self.needed_by[one]):
            if self._may_join(one, later, small, chains_only):
                return one, later
        for earlier in sorted(self.needs[one]):
            if self._may_join(earlier, one, small, chains_only):
                return earlier, one
        return None

    def _may_join(self, earlier: int, later: int, small: float, chains_only: bool) -> bool:
        kind = self.kinds[earlier]
        if kind is None or kind != self.kinds[later]:
            return False
        one, other = self._cost[earlier], self._cost[later]
        is_only_need = self.needs[later] == {earlier}
        is_only_use = self.needed_by[earlier] == {later}
        if is_only_need and is_only_use:
            return min(one, other) < small or one + other < self.small_chain
        if chains_only:
            return False
        extra = self.extra[earlier] + self.extra[later]
        if is_only_need:  # others that need `earlier` would wait for `later` too
            return other + extra < small
        if is_only_use:  # `earlier` would wait for the others that `later` needs
            return one + extra < small
        return False

    def _unite(self, earlier: int, later: int) -> set[int]:
        """Make `later` a part of `earlier`; return it and its neighbours."""
        if not (self.needs[later] == {earlier} and self.needed_by[earlier] == {later}):
            added = self._cost[later] if self.needs[later] == {earlier} else self._cost[earlier]
            self.extra[earlier] += self.extra[later] + added
        else:
            self.extra[earlier] += self.extra[later]
        self.members[earlier] += self.members.pop(later)
        self._cost[earlier] += self._cost.pop(later)
        self._replace(self.needs, self.needed_by, earlier, later)
        self._replace(self.needed_by, self.needs, earlier, later)
        del self.extra[later]
        return {earlier, *self.needs[earlier], *self.needed_by[earlier]}

    def _replace(self, there: dict[int, set[int]], back: dict[int, set[int]], kept: int, gone: int) -> None:
        others = there.pop(gone) - {kept}
        for other in others:
            back[other].discard(gone)
            back[other].add(kept)
        there[kept] = (there[kept] | others) - {gone, kept}

    def in_order(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups in topological order; of several possible next ones, the one with the first node."""
        waits = {group: len(needs) for group, needs in self.needs.items()}
        ready = sorted((group for group, count in waits.items() if not count), reverse=True)
        found: list[tuple[int, ...]] = [(source,) for source in sorted(self.sources)]
        while ready:
            group = ready.pop()
            found.append(tuple(sorted(self.members[group])))
            for later in self.needed_by[group]:
                waits[later] -= 1
                if not waits[later]:
                    ready.append(later)
            ready.sort(reverse=True)
        assert len(found) == len(self.members) + len(self.sources)
        return tuple(found)
