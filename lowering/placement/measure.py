"""How fast the devices of this process are: arithmetic, memory, the links between them, and single units of a graph.

The one file of this folder that runs anything. What is measured is kept for as long as the process lives: a device is
measured by its kind, a link by the kinds of its ends, a unit by its text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import jit as jax_jit
from jax.sharding import SingleDeviceSharding

from dflow.lowering.devices import device_named
from dflow.lowering.discharge import discharge
from dflow.lowering.placement.costs import Rates, analysed
from dflow.lowering.placement.instance import Price, runs_alone
from dflow.lowering.placement.problem import Link, Machine
from dflow.lowering.placement.work import Work, runs_how_long, work_of
from dflow.tracing.errors import DeadlineExceeded
from dflow.tracing.graph import Graph, Node, Value
from dflow.tracing.text import text
from dflow.tracing.types import ArrayType, RefType

#: How long the devices and links of a process may take to be measured, in s.
DEADLINE_S = 60.0
#: How long the units of one graph may take to be measured, compilation included, in s; the rest is estimated.
UNITS_S = 10.0
#: A median is of so many runs, or of three if they take longer than `ENOUGH_S`; before it, memory is warmed up.
ROUNDS, WARM_UPS, ENOUGH_S = 9, 3, 0.1

_SIDE = 384
_SMALL, _LARGE = 1 << 10, 1 << 22  # bytes


class Meter:
    """Measures the devices of this process, by name. `clock` is in s."""

    def __init__(self, deadline_s: float = DEADLINE_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._deadline_s, self._clock = deadline_s, clock
        self._until = float("inf")
        self._rates: dict[str, Rates] = {}
        self._links: dict[tuple[str, str, bool], Link] = {}
        self._speeds: dict[tuple[str, int], tuple[float, ...]] = {}
        self._units: dict[tuple[str, str], tuple[float, int]] = {}

    def machine(self, names: Sequence[str]) -> Machine:
        """The devices of these names with all that joins them. Raises DeadlineExceeded, which says what was late."""
        self._until = self._clock() + self._deadline_s
        devices = [device_named(name) for name in names]
        pools = [_pool(device) for device in devices]
        numbers = {pool: number for number, pool in enumerate(dict.fromkeys(pools))}
        rates = [self.rates(name) for name in names]
        in_pool = [[name for name, its in zip(names, pools, strict=True) if its == pool] for pool in numbers]
        return Machine(
            tuple(names),
            tuple(tuple(self._link(one, other) for other in names) for one in names),
            tuple(rate.launch_s for rate in rates),
            tuple(_limit(device) for device in devices),
            tuple(numbers[pool] for pool in pools),
            tuple(map(self._speeds_of, in_pool)),
        )

    def rates(self, name: str) -> Rates:
        """How fast a device is."""
        device = device_named(name)
        kind = _kind(device)
        if kind not in self._rates:
            self._in_time(f"{name} was to be measured")
            side = jax.device_put(np.ones((_SIDE, _SIDE), np.float32), device)
            row = jax.device_put(np.ones(_LARGE // 4, np.float32), device)
            one = jax.device_put(np.ones(1, np.float32), device)
            launch = self._median(_ADD_ONE, one)
            product = self._median(_PRODUCT, side)
            copied = self._median(_ADD_ONE, row)
            self._rates[kind] = Rates(
                2.0 * _SIDE**3 / max(product - launch, product / 2),
                2.0 * _LARGE / max(copied - launch, copied / 2),
                launch,
            )
        return self._rates[kind]

    def _link(self, one: str, other: str) -> Link:
        source, target = device_named(one), device_named(other)
        key = _kind(source), _kind(target), one == other
        if key not in self._links:
            self._in_time(f"the link from {one} to {other} was to be measured")
            small, large = (
                self._median(lambda x: jax.device_put(x, target), jax.device_put(np.ones(size, np.uint8), source))
                for size in (_SMALL, _LARGE)
            )
            # A busy machine may take longer for the small one; then half of the time is taken for that of the bytes.
            self._links[key] = Link(small, _LARGE / max(large - small, large / 2))
        return self._links[key]

    def _speeds_of(self, names: Sequence[str]) -> tuple[float, ...]:
        """How fast each of the devices is while some of them work."""
        if len(names) < 2:
            return ()
        key = _kind(device_named(names[0])), len(names)
        if key not in self._speeds:
            self._in_time(f"{', '.join(names)} were to be measured together")
            sides = [jax.device_put(np.ones((_SIDE, _SIDE), np.float32), device_named(name)) for name in names]
            for side in sides:
                jax.block_until_ready(_PRODUCT(side))
            found = self._in_turn([(_all_products, sides[: number + 1]) for number in range(len(sides))])
            speeds = [min(1.0, found[0] / seconds) for seconds in found]
            self._speeds[key] = tuple(min(speeds[: number + 1]) for number in range(len(speeds)))
        return self._speeds[key]

    def prices(self, parts: Sequence[Graph], names: Sequence[str], deadline_s: float = UNITS_S) -> list[Price]:
        """What parts of a graph take on each device: measured while there is time, after that estimated.

        A part is run on numbers of its own, on no variable. What could turn for ever, or be seen outside, is not run.
        """
        until = self._clock() + deadline_s
        priced = []
        for part in parts:
            found = [self._unit(part, name, is_late=self._clock() > until) for name in names]
            priced.append(Price(tuple(seconds for seconds, _ in found), max(scratch for _, scratch in found)))
        return priced

    def estimate(self, node: Node, name: str) -> float:
        """Roughly what a node takes, in s, by its types alone."""
        return self.rates(name).seconds(work_of(node))

    def _unit(self, part: Graph, name: str, *, is_late: bool) -> tuple[float, int]:
        if any(map(runs_alone, part.nodes)) or not any(self.estimate(node, name) for node in part.nodes):
            return 0.0, 0
        key = _canonical(part), _kind(device_named(name))
        if key not in self._units:
            if is_late or not all(map(_can_be_made, part.inputs)):
                return self._estimated(part, name), 0
            self._units[key] = self._measured(part, name)
        return self._units[key]

    def _estimated(self, part: Graph, name: str) -> float:
        total = Work()
        for node in part.nodes:
            total = total.plus(work_of(node))
        return self.rates(name).seconds(total)

    def _measured(self, part: Graph, name: str) -> tuple[float, int]:
        device, rates, pure = device_named(name), self.rates(name), discharge(part)
        place = SingleDeviceSharding(device)
        structs = [jax.ShapeDtypeStruct(type.shape, type.dtype, sharding=place) for type in pure.types]
        compiled = jax_jit(pure.fn).lower(*structs).compile()
        memory = compiled.memory_analysis()
        scratch = int(getattr(memory, "temp_size_in_bytes", 0) or 0)
        if any(map(runs_how_long, part.nodes)):
            return rates.seconds(analysed(compiled) or Work()), scratch
        operands = [jax.device_put(operand, device) for operand in _operands(pure.types)]
        seconds = self._median(lambda args: compiled(*args), operands)
        return max(0.0, seconds - rates.launch_s), scratch

    def _median(self, run: Callable[[Any], Any], operand: Any) -> float:
        return self._in_turn([(run, operand)])[0]

    def _in_turn(self, ways: Sequence[tuple[Callable[[Any], Any], Any]]) -> list[float]:
        """The median time of each way, all of them run in each round."""
        found: list[list[float]] = [[] for _ in ways]
        until = self._clock() + ENOUGH_S
        for turn in range(WARM_UPS):
            if turn == 0 or self._clock() < until:
                for run, operand in ways:
                    jax.block_until_ready(run(operand))
        until = self._clock() + ENOUGH_S
        for turn in range(ROUNDS):
            if turn >= 3 and self._clock() > until:
                break
            for (run, operand), times in zip(ways, found, strict=True):
                started = self._clock()
                jax.block_until_ready(run(operand))
                times.append(self._clock() - started)
        return list(map(statistics.median, found))

    def _in_time(self, what: str) -> None:
        if self._clock() > self._until:
            raise DeadlineExceeded(
                f"{what}, but the {self._deadline_s:g} s for measuring the devices of this process are over\n"
                "  something else keeps them busy; place the ops by name, as in dflow.device('cpu:0')"
            )


_ADD_ONE = jax_jit(lambda x: x + 1)
_PRODUCT = jax_jit(lambda x: x @ x)


def _all_products(sides: Sequence[jax.Array]) -> list[jax.Array]:
    return [_PRODUCT(side) for side in sides]


def _kind(device: jax.Device) -> str:
    return f"{device.platform} {device.device_kind}"


def _pool(device: jax.Device) -> str:
    """Devices of the CPU share its cores; any other has processors of its own."""
    return "cpu" if device.platform == "cpu" else f"{device.platform} {device.id}"


def _limit(device: jax.Device) -> int | None:
    stats = device.memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def _can_be_made(value: Value) -> bool:
    type = value.type.of if isinstance(value.type, RefType) else value.type
    return isinstance(type, ArrayType) and isinstance(type.dtype, np.dtype)


def _operands(types: Sequence[ArrayType]) -> list[np.ndarray[Any, Any]]:
    """Numbers to measure with: ones, and where they are whole, numbers all over, for they may be places in a table."""
    draws = np.random.default_rng(0)
    largest = max((dim for type in types for dim in type.shape), default=1)
    return [
        draws.integers(0, min(largest, np.iinfo(type.dtype).max), type.shape, type.dtype, endpoint=False)
        if type.dtype.kind in "iu" and largest > 1
        else np.ones(type.shape, type.dtype)
        for type in types
    ]


def _canonical(part: Graph) -> str:
    """The text of a part, the same for parts that differ in names and lines alone."""
    new: dict[Any, Any] = {}
    for value in (*part.inputs, *(given for node in part.nodes for given in node.outputs)):
        new[value] = Value(str(len(new)), value.type)
    nodes = []
    for node in part.nodes:
        operands = tuple(new.get(operand, operand) for operand in node.inputs)
        nodes.append(Node(node.op, operands, tuple(new[value] for value in node.outputs), node.attributes))
    inputs, outputs = (tuple(new.get(value, value) for value in values) for values in (part.inputs, part.outputs))
    return text(Graph(inputs, tuple(nodes), outputs), locs=False)
