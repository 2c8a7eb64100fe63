"""Greedy placement: units in the order of their upward rank, each on the device where it would end soonest.

After HEFT (Topcuoglu et al. 2002), with three differences. A value that is already on a device, or being sent there for
another unit, is not sent again. A link carries one value at a time. A device with too little memory left is skipped, as
in Baechi (B. Jeon et al.: Baechi: fast device placement of machine learning graphs. SoCC 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dflow.lowering.placement.problem import Assignment, Problem


def greedy(problem: Problem, *, fills_gaps: bool = True, looks_ahead: bool = False) -> Assignment:
    """Return an assignment that satisfies the constraints, made in one pass.

    fills_gaps   whether a unit may run before units that were assigned to its device earlier
    looks_ahead  whether the end of a unit includes the longest transfer to a user whose device is known
    """
    state = _Chosen(problem, fills_gaps=fills_gaps, looks_ahead=looks_ahead)
    for number in by_rank(problem):
        state.add(number)
    return tuple(state.assignment)


def by_rank(problem: Problem) -> list[int]:
    """Return the units, those with the longest path to the end first, each after all that it depends on."""
    ranks = problem.ranks
    # With costs of zero a unit may have the rank of a unit that it depends on; then their order decides.
    return sorted(range(len(problem.units)), key=lambda number: (-ranks[number], number))


class _Chosen:
    def __init__(self, problem: Problem, *, fills_gaps: bool, looks_ahead: bool) -> None:
        self.problem, self.fills_gaps, self.looks_ahead = problem, fills_gaps, looks_ahead
        machine = problem.machine
        self.assignment = [-1] * len(problem.units)
        self._end = [0.0] * len(problem.units)
        self._block: list[int | None] = [None] * len(problem.together)
        #: The busy intervals of each device, in order.
        self._work: list[list[tuple[float, float]]] = [[] for _ in machine.names]
        self._there: list[dict[int, float]] = [
            {value.source: 0.0} if value.source is not None else {} for value in problem.values
        ]
        self._link_free: dict[tuple[int, int], float] = {}
        self._held = [0] * len(machine.names)
        for value in problem.values:
            if value.source is not None:
                self._held[value.source] += value.size_bytes
        self._uses = [
            len(takers) + value.is_output for takers, value in zip(problem.takers, problem.values, strict=True)
        ]

    def add(self, number: int) -> None:
        block = self.problem.block_of[number]
        chosen = self._block[block]
        devices = self.problem.choices[block] if chosen is None else (chosen,)
        room = {device: self._room(device, number, new=chosen is None) for device in devices}
        fitting = [device for device in devices if room[device] >= 0] or [max(devices, key=lambda d: (room[d], -d))]
        device = min(fitting, key=lambda device: (self._outlook(number, device), device))
        if chosen is None:
            self._block[block] = device
            self._held[device] += self._state(block)
        self._put(number, device)

    def _state(self, block: int) -> int:
        return sum(self.problem.units[unit].state_bytes for unit in self.problem.together[block])

    def _room(self, device: int, number: int, *, new: bool) -> float:
        limit = self.problem.machine.limits[device]
        if limit is None:
            return float("inf")
        problem, unit = self.problem, self.problem.units[number]
        wanted = unit.scratch_bytes + sum(problem.values[value].size_bytes for value in problem.gives[number])
        wanted += sum(problem.values[value].size_bytes for value in unit.takes if device not in self._there[value])
        return limit - self._held[device] - wanted - (self._state(problem.block_of[number]) if new else 0)

    def _outlook(self, number: int, device: int) -> float:
        end = self._times(number, device)[1]
        return end + self._way_on(number, device) if self.looks_ahead else end

    def _way_on(self, number: int, device: int) -> float:
        """Return the time of the longest transfer to a user whose device is known."""
        problem, longest = self.problem, 0.0
        for value in problem.gives[number]:
            moved = problem.values[value]
            for taker in problem.takers[value]:
                known = self._block[problem.block_of[taker]]
                choices = problem.choices[problem.block_of[taker]]
                target = known if known is not None else choices[0] if len(choices) == 1 else device
                if target != device:
                    longest = max(longest, problem.machine.links[device][target].seconds(moved.size_bytes))
        return longest

    def _times(self, number: int, device: int) -> tuple[float, float]:
        unit = self.problem.units[number]
        ready = max([0.0, *(self._end[earlier] for earlier in unit.after)])
        taken: dict[tuple[int, int], float] = {}
        for value in unit.takes:
            ready = max(ready, self._arrival(value, device, taken)[1])
        cost = self.problem.cost(number, device)
        start = self._slot(device, ready, cost)
        return start, start + cost

    def _arrival(
        self, value: int, device: int, taken: dict[tuple[int, int], float]
    ) -> tuple[tuple[int, int] | None, float]:
        """Return the link of a value and its arrival; `taken` is when links are free after this unit's transfers."""
        there = self._there[value]
        if device in there:
            return None, there[device]
        source = self._origin(value)
        key, link = (source, device), self.problem.machine.links[source][device]
        size = self.problem.values[value].size_bytes
        begin = max(there[source], taken.get(key, self._link_free.get(key, 0.0)))
        taken[key] = begin + link.occupied_s(size)
        return key, begin + link.seconds(size)

    def _origin(self, value: int) -> int:
        moved = self.problem.values[value]
        if moved.producer is not None:
            return self.assignment[moved.producer]
        assert moved.source is not None
        return moved.source

    def _slot(self, device: int, ready: float, cost: float) -> float:
        work = self._work[device]
        if not work:
            return ready
        if self.fills_gaps:
            if ready + cost <= work[0][0]:
                return ready
            for (_, end), (start, _) in pairwise(work):
                begin = max(ready, end)
                if begin + cost <= start:
                    return begin
        return max(ready, work[-1][1])

    def _put(self, number: int, device: int) -> None:
        problem, unit = self.problem, self.problem.units[number]
        start, end = self._times(number, device)
        for value in unit.takes:
            _, arrival = self._arrival(value, device, self._link_free)
            if device not in self._there[value]:
                self._there[value][device] = arrival
                self._held[device] += problem.values[value].size_bytes
        self.assignment[number], self._end[number] = device, end
        self._work[device].append((start, end))
        self._work[device].sort()
        for value in problem.gives[number]:
            self._there[value][device] = end
            self._held[device] += problem.values[value].size_bytes
        self._let_go(unit.takes)

    def _let_go(self, values: Sequence[int]) -> None:
        """Free the values that no later unit takes."""
        for value in values:
            self._uses[value] -= 1
            if not self._uses[value] and self.problem.values[value].producer is not None:
                for device in self._there[value]:
                    self._held[device] -= self.problem.values[value].size_bytes
