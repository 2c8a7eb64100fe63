"""A placement problem as numbers: units of work, the values between them, devices and the links between these.

Nothing here depends on graphs. Units, values and devices are known by their indices. Units are in topological order. An
assignment is a tuple with the device of each unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

#: The index of the device of each unit.
Assignment = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """The connection from one device to another. It carries one value at a time; their latencies overlap.

    The bytes of a value beyond `knee_bytes` move at the rate `beyond_bytes_per_s`: allocating much memory may be slow.
    """

    latency_s: float
    bytes_per_s: float
    knee_bytes: float = math.inf
    beyond_bytes_per_s: float = math.inf

    def occupied_s(self, size_bytes: int) -> float:
        """Return how long a value of this size occupies the link, in s."""
        beyond = max(0.0, size_bytes - self.knee_bytes)
        return (size_bytes - beyond) / self.bytes_per_s + beyond / self.beyond_bytes_per_s

    def seconds(self, size_bytes: int) -> float:
        """Return the time from the start of a transfer to its end, in s."""
        return self.latency_s + self.occupied_s(size_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices and their links.

    `links[source][destination]`  those from a device to itself are not used
    `launch_s`  time of each device to start a unit
    `limits`    memory of each device in bytes, None without a limit
    `pools`     pool of each device; devices of one pool share processors
    `speeds`    by pool, the speed of each of its devices while 1, 2, 3, ... of them work, relative to one alone; the
                last number holds for more devices, and an empty tuple means 1.0
    """

    names: tuple[str, ...]
    links: tuple[tuple[DeviceLink, ...], ...]
    launch_s: tuple[float, ...]
    limits: tuple[int | None, ...]
    pools: tuple[int, ...]
    speeds: tuple[tuple[float, ...], ...]

    def speed(self, pool: int, working: int) -> float:
        """Return the relative speed of each device of the pool while `working` of them work."""
        speeds = self.speeds[pool]
        return speeds[min(working, len(speeds)) - 1] if speeds else 1.0

    @property
    def devices(self) -> range:
        """The indices of the devices."""
        return range(len(self.names))


@dataclass(frozen=True, slots=True)
class Moved:
    """A value: its size, the unit that produces it, and for an input the device that holds it at first.

    `is_output`  whether its producer's device keeps it until the end
    """

    size_bytes: int
    producer: int | None
    source: int | None = None
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of work, which runs on one device as a whole.

    `seconds`        time on each device, without the launch
    `takes`          indices of its operands, each once
    `after`          units that must run before it, though it takes none of their values
    `devices`        devices where it may run, in order
    `scratch_bytes`  memory that it needs while it runs, beside operands and results
    `state_bytes`    memory of its variables, which its device holds permanently
    `touches_state`  whether it reads or writes variables
    """

    seconds: tuple[float, ...]
    takes: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    scratch_bytes: int = 0
    state_bytes: int = 0
    touches_state: bool = False


@dataclass(frozen=True)
class Problem:
    """Units, values and the machine."""

    machine: Machine
    units: tuple[Unit, ...]
    values: tuple[Moved, ...]

    @cached_property
    def gives(self) -> tuple[tuple[int, ...], ...]:
        """The values that each unit produces."""
        producers = [() if value.producer is None else (value.producer,) for value in self.values]
        return _inverse(producers, len(self.units))

    @cached_property
    def takers(self) -> tuple[tuple[int, ...], ...]:
        """The units that take each value."""
        return _inverse([unit.takes for unit in self.units], len(self.values))

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """The units that name each unit in `after`."""
        return _inverse([unit.after for unit in self.units], len(self.units))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The units that each unit depends on, by value or by `after`."""
        return tuple(
            tuple(dict.fromkeys([*(p for v in unit.takes if (p := self.values[v].producer) is not None), *unit.after]))
            for unit in self.units
        )

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The units that depend on each unit, by value or by `after`."""
        return _inverse(self.predecessors, len(self.units))

    def cost(self, number: int, device: int) -> float:
        """Return the time of a unit on a device at full speed, in s. A unit that takes no time is not launched."""
        seconds = self.units[number].seconds[device]
        return seconds + self.machine.launch_s[device] if seconds else 0.0


def _inverse(lists: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each number below `count`, the indices of the lists that have it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for index, numbers in enumerate(lists):
        for number in numbers:
            found[number].append(index)
    return tuple(map(tuple, found))
