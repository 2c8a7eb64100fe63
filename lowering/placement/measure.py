"""Measure the devices of this process: arithmetic, memory, the links between them, and single units of a graph.

This is the only file of the folder that runs programs. Measurements are kept until the process ends: of a device by its
kind, of a link by the kinds of its ends, of a unit by its text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import jit as jax_jit
from jax.sharding import SingleDeviceSharding

from dflow.lowering.placement.graph_problem import Price, runs_alone
from dflow.lowering.placement.problem import DeviceLink, Machine
from dflow.lowering.placement.work import Rates, Work, runs_how_long, work_in, work_of
from dflow.lowering.programs.discharge import discharge
from dflow.lowering.values.devices import device_named
from dflow.tracing.errors import DeadlineExceeded
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.types import ArrayType, RefType
from dflow.tracing.syntax.text import text

#: Longest time for measuring the devices and links of a process, in s.
DEADLINE_S = 60.0
#: The smallest units, with less than this part of the estimated time of all, are estimated and not measured.
REST = 0.05
#: A median is of at most `ROUNDS` times; of fewer if half of them are within `ALIKE`, or after `ENOUGH_S` s.
ROUNDS, ALIKE, ENOUGH_S = 9, 0.05, 0.1
#: A time is that of a row of calls that take about `ROW_S` s together, divided by their number, at most `ROW`.
ROW_S, ROW = 2e-3, 50

_SIDE = 384
_ROW = 1 << 22  # bytes, as are the sizes below, of transfers over links
_SMALL, _MIDDLE, _LARGE = 1 << 10, 1 << 23, 1 << 25


class Meter:
    """Measures the devices of this process, by name. `clock` returns seconds."""

    def __init__(self, deadline_s: float = DEADLINE_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._deadline_s, self._clock = deadline_s, clock
        self._until = float("inf")
        self._rates: dict[str, Rates] = {}
        self._links: dict[tuple[str, str, bool], DeviceLink] = {}
        self._speeds: dict[tuple[str, int], tuple[float, ...]] = {}
        self._units: dict[_Key, UnitCost] = {}

    def machine(self, names: Sequence[str]) -> Machine:
        """Return the devices of these names with their links. Raises DeadlineExceeded, which names what was late."""
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
        """Return the speed of a device's arithmetic and memory, and the time of a launch."""
        device = device_named(name)
        kind = _kind(device)
        if kind not in self._rates:
            self._in_time(f"{name} was to be measured")
            side = jax.device_put(_side(), device)
            row = jax.device_put(np.ones(_ROW // 4, np.float32), device)
            one = jax.device_put(np.ones(1, np.float32), device)
            launch = self._in_a_row(_ADD_ONE, one)
            product = self._in_a_row(_PRODUCT, side)
            copied = self._in_a_row(_ADD_ONE, row)
            self._rates[kind] = Rates(
                2.0 * _SIDE**3 / max(product - launch, product / 2),
                2.0 * _ROW / max(copied - launch, copied / 2),
                launch,
            )
        return self._rates[kind]

    def _link(self, one: str, other: str) -> DeviceLink:
        source, target = device_named(one), device_named(other)
        key = _kind(source), _kind(target), one == other
        if key not in self._links:
            self._in_time(f"the link from {one} to {other} was to be measured")
            small, middle, large = (
                self._median(lambda x: jax.device_put(x, target), jax.device_put(np.ones(size, np.uint8), source))
                for size in (_SMALL, _MIDDLE, _LARGE)
            )
            # On a busy machine a smaller transfer may take longer. Then half of the time is attributed to the bytes.
            self._links[key] = DeviceLink(
                small,
                _MIDDLE / max(middle - small, middle / 2),
                _MIDDLE,
                (_LARGE - _MIDDLE) / max(large - middle, large / 2),
            )
        return self._links[key]

    def _speeds_of(self, names: Sequence[str]) -> tuple[float, ...]:
        """Return the relative speed of these devices while 1, 2, ... of them work, each number at most 1.0."""
        if len(names) < 2:
            return ()
        key = _kind(device_named(names[0])), len(names)
        if key not in self._speeds:
            self._in_time(f"{', '.join(names)} were to be measured together")
            sides = [jax.device_put(_side(), device_named(name)) for name in names]
            found = [self._median(lambda some: list(map(_PRODUCT, some)), sides[: n + 1]) for n in range(len(sides))]
            speeds = [min(1.0, found[0] / seconds) for seconds in found]
            self._speeds[key] = tuple(min(speeds[: number + 1]) for number in range(len(speeds)))
        return self._speeds[key]

    def prices(self, parts: Sequence[Graph], names: Sequence[str], budget_s: float) -> list[Price]:
        """Return the time and memory of parts of a graph on each device.

        The largest parts are measured, for at most `budget_s` seconds plus one measurement; the rest are estimated, at
        rates fitted to the measured ones. Equal parts are measured once. A part runs on made-up inputs, not on
        variables. Parts that might not end, or whose effects would be visible outside, are not run.
        """
        kinds = [_kind(device_named(name)) for name in names]
        texts = [_canonical(part) if self._takes_time(part, names[0]) else None for part in parts]
        self._measure(parts, texts, dict(zip(kinds, names, strict=True)), self._clock() + budget_s)
        fitted = {kind: self._fitted(kind, name) for kind, name in zip(kinds, names, strict=True)}
        priced = []
        for part, written in zip(parts, texts, strict=True):
            if written is None:
                priced.append(Price((0.0,) * len(names)))
                continue
            known = [self._units.get((written, kind)) for kind in kinds]
            seconds = [
                fitted[kind].seconds(work_in(part.nodes)) if unit is None else unit.seconds
                for kind, unit in zip(kinds, known, strict=True)
            ]
            priced.append(Price(tuple(seconds), max(unit.scratch_bytes if unit else 0 for unit in known)))
        return priced

    def estimate(self, node: Node, name: str) -> float:
        """Return a rough time of a node, in s, from its types alone."""
        return self.rates(name).seconds(work_of(node))

    def _takes_time(self, part: Graph, name: str) -> bool:
        return not any(map(runs_alone, part.nodes)) and any(self.estimate(node, name) for node in part.nodes)

    def _measure(
        self, parts: Sequence[Graph], texts: Sequence[str | None], named: Mapping[str, str], until: float
    ) -> None:
        """Measure the unknown parts, the largest first, until the rest is small or the clock is at `until`."""
        weights: dict[_Key, float] = {}
        unknown: dict[_Key, Graph] = {}
        for part, written in zip(parts, texts, strict=True):
            for kind, name in named.items() if written is not None else ():
                key = str(written), kind
                weights[key] = weights.get(key, 0.0) + self.rates(name).seconds(work_in(part.nodes))
                if key not in self._units and all(map(_can_be_made, part.inputs)):
                    unknown[key] = part
        left = sum(weights[key] for key in unknown)
        for key in sorted(unknown, key=lambda key: -weights[key]):
            if left < REST * sum(weights.values()) or self._clock() > until:
                break
            self._units[key] = self._measured(unknown[key], named[key[1]])
            left -= weights[key]

    def _fitted(self, kind: str, name: str) -> Rates:
        """Return the rates of a device at which the estimates of the measured units add up to their measured times.

        Units that do arithmetic for longer than they move bytes determine the arithmetic rate, the others the memory
        rate. If all are of one kind, they determine both.
        """
        rates = self.rates(name)
        found = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for (_, other), unit in self._units.items():
            if other == kind:
                sums = found[unit.work.flops / rates.flops_per_s > unit.work.moved_bytes / rates.bytes_per_s]
                sums[0] += rates.seconds(unit.work)
                sums[1] += unit.seconds
        flops, moved = (_ratio(*found[one]) or _ratio(*found[not one]) or 1.0 for one in (True, False))
        return replace(rates, flops_per_s=rates.flops_per_s * flops, bytes_per_s=rates.bytes_per_s * moved)

    def _measured(self, part: Graph, name: str) -> UnitCost:
        device, rates, pure = device_named(name), self.rates(name), discharge(part)
        sharding = SingleDeviceSharding(device)
        structs = [jax.ShapeDtypeStruct(type.shape, type.dtype, sharding=sharding) for type in (_TURN, *pure.types)]
        # An additional number passes through, so that each call of a row depends on the call before it.
        compiled = jax_jit(lambda turn, *args: (turn + 1, pure.fn(*args))).lower(*structs).compile()
        memory = compiled.memory_analysis()
        scratch = int(getattr(memory, "temp_size_in_bytes", 0) or 0)
        if any(map(runs_how_long, part.nodes)):
            return UnitCost(work_in(part.nodes), rates.seconds(_analysed(compiled)), scratch)
        turn, *operands = [jax.device_put(operand, device) for operand in _operands((_TURN, *pure.types))]
        seconds = self._in_a_row(lambda turn: compiled(turn, *operands)[0], turn)
        return UnitCost(work_in(part.nodes), max(0.0, seconds - rates.launch_s), scratch)

    def _in_a_row(self, call: Callable[[Any], Any], given: Any) -> float:
        """Return the time per call of a row of calls, each on the result of the one before, without waits in between.

        Steps follow each other like this, so the time to start a single call and to wait for it is left out.
        """

        def row(count: int) -> Any:
            last = given
            for _ in range(count):
                last = call(last)
            return last

        self._once(row, 1)
        once = self._once(row, 1)
        if once > ENOUGH_S:
            return once
        count = max(1, min(ROW, int(ROW_S / max(once, 1e-9))))
        return self._median(row, count) / count

    def _median(self, run: Callable[[Any], Any], given: Any) -> float:
        """Return the median time of some runs, after one that is not counted."""
        self._once(run, given)
        until, times = self._clock() + ENOUGH_S, list[float]()
        while len(times) < ROUNDS and not (times and self._clock() > until) and not _are_alike(times):
            times.append(self._once(run, given))
        return statistics.median(times)

    def _once(self, run: Callable[[Any], Any], given: Any) -> float:
        started = self._clock()
        jax.block_until_ready(run(given))
        return self._clock() - started

    def _in_time(self, what: str) -> None:
        if self._clock() > self._until:
            raise DeadlineExceeded(
                f"{what}, but the {self._deadline_s:g} s for measuring the devices of this process are over",
                "something else keeps them busy; place the ops by name, as in dflow.device('cpu:0')",
            )


_ADD_ONE = jax_jit(lambda x: x + 1)
_PRODUCT = jax_jit(lambda x: x @ x)


class UnitCost(NamedTuple):
    """A unit's work, its measured time in s without the launch, and the scratch memory that it needed, in bytes."""

    work: Work
    seconds: float
    scratch_bytes: int


#: The text of a unit, and the kind of the device.
_Key = tuple[str, str]
#: The type of the number that each call of a row passes to the next.
_TURN = ArrayType(np.dtype(np.float32), ())


def _analysed(compiled: Any) -> Work:
    """Return the work of a compiled program by XLA's cost analysis, which some platforms lack."""
    found = compiled.cost_analysis() or {}
    return Work(max(0.0, found.get("flops", 0.0)), max(0.0, found.get("bytes accessed", 0.0)))


def _ratio(estimated: float, measured: float) -> float | None:
    return estimated / measured if estimated and measured else None


def _are_alike(times: Sequence[float]) -> bool:
    """Whether there are at least three times, and half of them are within `ALIKE` of the least."""
    return len(times) >= 3 and statistics.median(times) <= min(times) * (1 + ALIKE)


def _side() -> np.ndarray[Any, Any]:
    """Return a matrix that is its own square, so that repeated products stay finite."""
    return np.full((_SIDE, _SIDE), 1 / _SIDE, np.float32)


def _kind(device: jax.Device) -> str:
    return f"{device.platform} {device.device_kind}"


def _pool(device: jax.Device) -> str:
    """Return the name of a device's processors: CPU devices share the cores, any other device has its own."""
    return "cpu" if device.platform == "cpu" else f"{device.platform} {device.id}"


def _limit(device: jax.Device) -> int | None:
    stats = device.memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def _can_be_made(value: Value) -> bool:
    type = value.type.of if isinstance(value.type, RefType) else value.type
    return isinstance(type, ArrayType) and isinstance(type.dtype, np.dtype)


def _operands(types: Sequence[ArrayType]) -> list[np.ndarray[Any, Any]]:
    """Return inputs to measure with: ones, but random numbers for integers, since these may be indices of a table."""
    draws = np.random.default_rng(0)
    largest = max((dim for type in types for dim in type.shape), default=1)
    return [
        draws.integers(0, min(largest, np.iinfo(type.dtype).max), type.shape, type.dtype, endpoint=False)
        if type.dtype.kind in "iu" and largest > 1
        else np.ones(type.shape, type.dtype)
        for type in types
    ]


def _canonical(part: Graph) -> str:
    """Return the text of a part, the same for parts that differ in names and lines alone."""
    new: dict[Any, Any] = {}
    for value in (*part.inputs, *(given for node in part.nodes for given in node.outputs)):
        new[value] = Value(str(len(new)), value.type)
    nodes = []
    for node in part.nodes:
        operands = tuple(new.get(operand, operand) for operand in node.inputs)
        nodes.append(Node(node.op, operands, tuple(new[value] for value in node.outputs), node.attributes, node.bodies))
    inputs, outputs = (tuple(new.get(value, value) for value in values) for values in (part.inputs, part.outputs))
    return text(Graph(inputs, tuple(nodes), outputs), locs=False)
