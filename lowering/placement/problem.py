"""What is to be placed, as numbers: units of work, the values between them, devices and the links between these.

Nothing here knows of graphs. Units stand in an order in which each comes after all it needs. An assignment is a tuple
with the number of a device for each unit; `allows` says which ones keep the constraints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

#: For each unit the number of its device.
Assignment = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """One way from a device to another. It carries one value at a time; their latencies overlap.

    Of a value, what is over `knee_bytes` goes at the rate `beyond_bytes_per_s`: large memory may be slow to be had.
    """

    latency_s: float
    bytes_per_s: float
    knee_bytes: float = math.inf
    beyond_bytes_per_s: float = math.inf

    def occupied_s(self, size_bytes: int) -> float:
        """How long a value keeps others from the link."""
        beyond = max(0.0, size_bytes - self.knee_bytes)
        return (size_bytes - beyond) / self.bytes_per_s + beyond / self.beyond_bytes_per_s

    def seconds(self, size_bytes: int) -> float:
        """From the start of a transfer to its end."""
        return self.latency_s + self.occupied_s(size_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices and what joins them.

    `links[source][destination]`  those from a device to itself are not used
    `launch_s`  what each device pays for starting a unit
    `limits`    each device's memory in bytes, None where there is no limit
    `pools`     devices of one number share processors
    `speeds`    by pool, how fast each of its devices is while 1, 2, 3, ... of them work, as part of its speed alone;
                the last stands for all further numbers, an empty one for 1.0
    """

    names: tuple[str, ...]
    links: tuple[tuple[Link, ...], ...]
    launch_s: tuple[float, ...]
    limits: tuple[int | None, ...]
    pools: tuple[int, ...]
    speeds: tuple[tuple[float, ...], ...]

    def speed(self, pool: int, working: int) -> float:
        """How fast each device of the pool is while so many of them work."""
        speeds = self.speeds[pool]
        return speeds[min(working, len(speeds)) - 1] if speeds else 1.0

    @property
    def devices(self) -> range:
        """The numbers of the devices."""
        return range(len(self.names))


@dataclass(frozen=True, slots=True)
class Moved:
    """A value: its size, the unit that gives it, and the device it is on at first when it is an input.

    `is_output`  whether it is kept to the end, where it was made
    """

    size_bytes: int
    producer: int | None
    source: int | None = None
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """What runs as one.

    `seconds`        by device, without the launch
    `takes`          numbers of values, each once
    `after`          units that must have run before, though none of their values is taken
    `devices`        where it may run, in order
    `scratch_bytes`  what it needs while it runs, beside what it takes and gives
    `state_bytes`    what lives with it for good: its variables
    `touches_state`  whether it reads or writes variables
    """

    name: str
    seconds: tuple[float, ...]
    takes: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    scratch_bytes: int = 0
    state_bytes: int = 0
    touches_state: bool = False


@dataclass(frozen=True)
class Problem:
    """Units, values and the machine. The units of each tuple in `together` share a device; every unit is in one.

    `fuses` says whether the units of a device that stand between transfers run as one (see `calls`).
    """

    machine: Machine
    units: tuple[Unit, ...]
    values: tuple[Moved, ...]
    together: tuple[tuple[int, ...], ...]
    fuses: bool = False

    @cached_property
    def gives(self) -> tuple[tuple[int, ...], ...]:
        """The values each unit gives."""
        found: list[list[int]] = [[] for _ in self.units]
        for number, value in enumerate(self.values):
            if value.producer is not None:
                found[value.producer].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def takers(self) -> tuple[tuple[int, ...], ...]:
        """The units that take each value."""
        found: list[list[int]] = [[] for _ in self.values]
        for number, unit in enumerate(self.units):
            for value in unit.takes:
                found[value].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """The units that come after each by `after`."""
        found: list[list[int]] = [[] for _ in self.units]
        for number, unit in enumerate(self.units):
            for earlier in unit.after:
                found[earlier].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The units that each needs, by value or by order."""
        return tuple(
            tuple(dict.fromkeys([*(p for v in unit.takes if (p := self.values[v].producer) is not None), *unit.after]))
            for unit in self.units
        )

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The units that need each, by value or by order."""
        found: list[dict[int, None]] = [{} for _ in self.units]
        for number, before in enumerate(self.predecessors):
            for earlier in before:
                found[earlier][number] = None
        return tuple(map(tuple, found))

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """The number in `together` of each unit."""
        found = [0] * len(self.units)
        for number, block in enumerate(self.together):
            for unit in block:
                found[unit] = number
        return tuple(found)

    @cached_property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """For each of `together` the devices on which all its units may run."""
        return tuple(
            tuple(d for d in self.machine.devices if all(d in self.units[unit].devices for unit in block))
            for block in self.together
        )

    @cached_property
    def is_limited(self) -> bool:
        """Whether any device has a limit of memory."""
        return any(limit is not None for limit in self.machine.limits)

    @cached_property
    def ranks(self) -> tuple[float, ...]:
        """The longest way, in s, from the start of each unit to the end, at mean costs: the upward rank of HEFT.

        H. Topcuoglu, S. Hariri, M. Wu: Performance-effective and low-complexity task scheduling for heterogeneous
        computing. IEEE TPDS 13 (2002).
        """
        latency, per_byte = self._mean_link
        ranks = [0.0] * len(self.units)
        for number in reversed(range(len(self.units))):
            unit, rest = self.units[number], 0.0
            for value in self.gives[number]:
                transfer = latency + self.values[value].size_bytes * per_byte
                rest = max([rest, *(transfer + ranks[taker] for taker in self.takers[value])])
            rest = max([rest, *(ranks[follower] for follower in self.followers[number])])
            costs = [self.cost(number, device) for device in unit.devices]
            ranks[number] = sum(costs) / max(1, len(costs)) + rest
        return tuple(ranks)

    @cached_property
    def _mean_link(self) -> tuple[float, float]:
        links = [self.machine.links[a][b] for a in self.machine.devices for b in self.machine.devices if a != b]
        if not links:
            return 0.0, 0.0
        count = len(links)
        return sum(link.latency_s for link in links) / count, sum(1 / link.bytes_per_s for link in links) / count

    def cost(self, number: int, device: int) -> float:
        """How long a unit keeps a device that works at full speed, in s. What takes no time is not launched."""
        seconds = self.units[number].seconds[device]
        return seconds + self.machine.launch_s[device] if seconds else 0.0

    def allows(self, assignment: Sequence[int]) -> bool:
        """Whether each unit is where it may run, and units that belong together are. Memory is the simulation's."""
        return all(
            assignment[block[0]] in choices and len({assignment[unit] for unit in block}) == 1
            for block, choices in zip(self.together, self.choices, strict=True)
        )

    def spread(self, devices: Mapping[int, int] | Sequence[int]) -> Assignment:
        """The assignment that gives each of `together` the device of its number."""
        return tuple(devices[block] for block in self.block_of)
