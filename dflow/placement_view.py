"""`dflow.explain_placement`: where each part of a function runs and why, and how long a step takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax

from dflow.function import Function
from dflow.homes import LOCAL, home_of
from dflow.lowering.devices import devices_in_order
from dflow.lowering.local import METER
from dflow.lowering.passes.base import run_passes
from dflow.lowering.passes.choose import Choose, Decision
from dflow.lowering.passes.merge import Merge
from dflow.lowering.passes.place import Place
from dflow.lowering.passes.prune import Prune
from dflow.lowering.pipeline import ALONE
from dflow.lowering.placement.choose import all_on
from dflow.lowering.placement.instance import runs_alone
from dflow.lowering.placement.measure import WARM_UPS
from dflow.lowering.placement.regions import alternatives
from dflow.lowering.placement.score import predicted, scored
from dflow.tracing.context import home
from dflow.tracing.device import WITH_STATE, choices_in, device_scope
from dflow.tracing.effects import Effect
from dflow.tracing.errors import DeviceError
from dflow.tracing.graph import Graph, Node
from dflow.tracing.resources import Variable
from dflow.tracing.source import at, caller
from dflow.tracing.trace import Traced, trace
from dflow.tracing.types import HOST_HANDLES


@dataclass(frozen=True)
class PlacedPart:
    """Some ops that stand together.

    value     the name of the last value they give, as the graph's text has it
    ops       how many they are
    device    where they run, such as `cpu:1`
    reason    why there
    lines     the user's lines they come from, the first ones
    is_state  whether they are where they are for a variable
    """

    value: str
    ops: int
    device: str
    reason: str
    lines: tuple[str, ...]
    is_state: bool


@dataclass(frozen=True)
class Placement:
    """Where the ops of a function run, and why; `print` gives it as text. Made by `dflow.explain_placement`.

    predicted_s     how long a step is predicted to take
    measured_s      the median time of a step; None where it was not run
    all_on_one_s    by device, what is predicted with all on it that may be there
    busy_s          by device, how long it works in a step
    peak_bytes      by device, the most memory that a step takes there, variables included
    transfers       how many values travel between devices in a step
    moved_bytes     how many bytes these are
    parts           the ops, in the order of the program
    """

    name: str
    predicted_s: float
    measured_s: float | None
    all_on_one_s: dict[str, float]
    busy_s: dict[str, float]
    peak_bytes: dict[str, int]
    transfers: int
    moved_bytes: int
    parts: tuple[PlacedPart, ...]

    def __str__(self) -> str:
        return "\n".join([*self._head(), *self._rows()])

    def _head(self) -> list[str]:
        measured = f", measured {_time(self.measured_s)}" if self.measured_s is not None else ", not measured"
        lines = [f"{self.name}: a step is predicted to take {_time(self.predicted_s)}{measured}"]
        lines += [
            f"  {device} works for {_time(busy)} and holds {_size(self.peak_bytes[device])} at its peak"
            for device, busy in self.busy_s.items()
        ]
        lines.append(f"  {self.transfers} values travel, {_size(self.moved_bytes)}")
        if len(self.all_on_one_s) > 1:
            others = ", ".join(f"{_time(seconds)} on {device}" for device, seconds in self.all_on_one_s.items())
            lines.append(f"  as far as it may be on one device, it would take {others}")
        return lines

    def _rows(self) -> list[str]:
        rows = [
            _row(list(parts)) for _, parts in groupby(self.parts, lambda part: (part.device, part.is_state, _own(part)))
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        return [f"{what:<{widths[0]}}  {device:<{widths[1]}}  {rest}" for what, device, rest in rows]


def _own(part: PlacedPart) -> int:
    """What keeps a part from sharing a line with the next: only those on variables may."""
    return 0 if part.is_state else id(part)


def _row(parts: Sequence[PlacedPart]) -> tuple[str, str, str]:
    """What a line says of parts that share it."""
    first, lines = parts[0], list(dict.fromkeys(line for part in parts for line in part.lines if line != "..."))
    more = len(lines) > 2 or any("..." in part.lines for part in parts)
    shown = ", ".join([*lines[:2], *(["..."] if more else [])])
    comment = f"  # {shown}" if shown else ""
    if len(parts) > 1:
        return f"%{first.value} to %{parts[-1].value}", first.device, f"variables that live there{comment}"
    others = f" and {first.ops - 1} before it" if first.ops > 1 else ""
    return f"%{first.value}{others}", first.device, f"{first.reason}{comment}"


def explain_placement(fn: Callable[..., Any], /, *args: Any, rounds: int = 5) -> Placement:
    """Where the ops of `fn` run for arguments of these types, and why; what a step takes, predicted and measured.

    fn      a function, decorated by `dflow.jit` or not, of one process
    args    its arguments: arrays, or `jax.ShapeDtypeStruct`s, with which it is not run
    rounds  how often it is run to be measured, on copies of its variables, so that nothing changes; with 0, or if it
            uses queues or acts on the world, it is not run
    raises  DeviceError for a function whose variables are on a cluster, and as a call of the function would

    Ops that `dflow.device("auto")` covers are chosen; of each such part it says by how much a step would be longer with
    it on the next best device. The first call in a process measures the devices, which takes about a second.
    """
    own = fn.fn if isinstance(fn, Function) else fn
    traced = trace(own, args, {})
    if home_of(traced) is not LOCAL:
        raise DeviceError(
            f"{_name(fn)} has variables on a cluster, and costs are of the devices of one process{at(caller())}\n"
            "  print(dflow.graph(fn, ...)) shows the task of each op"
        )
    graph = run_passes(traced.graph, (Prune(), Merge()))
    decision = Choose(Place(ALONE, (ALONE,), devices_in_order()), METER).decide(graph)
    return explained(_name(fn), graph, decision, _measured(traced, args, rounds))


def explained(name: str, graph: Graph, decision: Decision, measured_s: float | None) -> Placement:
    """What was decided for a graph, in words. `graph` has its choices still open."""
    problem, found = decision.instance.problem, decision.found
    names = problem.machine.names
    step = predicted(problem, found.assignment)
    used = [device for device in problem.machine.devices if step.busy_s[device] or step.peak_bytes[device]]
    device_of = [names[device] for device in found.assignment]
    rows: list[tuple[list[int], str, str]] = []
    for other in alternatives(problem, found.assignment):
        units = [unit for block in other.region for unit in problem.together[block]]
        gain = f"ends {_time(other.loss_s)} earlier than" if other.loss_s > 0 else "ends as early as"
        rows.append((units, device_of[units[0]], f"chosen: the step {gain} with {names[other.device]}"))
    chosen = {unit for units, _, _ in rows for unit in units}
    for unit, group in enumerate(decision.instance.groups):
        if unit not in chosen:
            rows.append(([unit], device_of[unit], _reason([graph.nodes[number] for number in group])))
    parts = [
        _part([graph.nodes[number] for unit in units for number in decision.instance.groups[unit]], device, reason)
        for units, device, reason in sorted(rows)
    ]
    return Placement(
        name,
        step.step_s,
        measured_s,
        {names[device]: scored(problem, all_on(problem, device)).step_s for device in problem.machine.devices},
        {names[device]: step.busy_s[device] for device in used},
        {names[device]: step.peak_bytes[device] for device in used},
        len(step.transfers),
        sum(problem.values[move.value].size_bytes for move in step.transfers),
        tuple(parts),
    )


def _part(nodes: Sequence[Node], device: str, reason: str) -> PlacedPart:
    lines = list(dict.fromkeys(node.loc.short for node in nodes if node.loc is not None))
    shown = (*lines[:2], "...") if len(lines) > 2 else tuple(lines)
    touched = any(ref is not None for node in nodes for _, ref in node.effects)
    is_state = touched and not any(map(runs_alone, nodes))
    return PlacedPart(nodes[-1].outputs[0].name, len(nodes), device, reason, shown, is_state)


def _reason(nodes: Sequence[Node]) -> str:
    """Why nodes without a choice are where they are: what binds one of them binds all."""
    for node in nodes:
        refs = [ref for _, ref in node.effects if ref is not None]
        if runs_alone(node):
            return "run by the process itself"
        if refs:
            return f"%{refs[0].name} lives there"
    stated = [node.device for node in nodes if node.device is not None]
    if not stated:
        return "no scope: beside what it takes"
    if any(choices_in(device) is not None for device in stated):
        return "the only device that it may run on"
    return "stated" if any(device != WITH_STATE for device in stated) else "beside the variable that it updates"


def _measured(traced: Traced, args: Sequence[Any], rounds: int) -> float | None:
    leaves = jax.tree_util.tree_leaves(args)
    if not rounds or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves) or not _may_be_run(traced.graph):
        return None
    with home(LOCAL):
        copies = tuple(_copy(variable) for variable in traced.variables)
    run = LOCAL.runner(replace(traced, variables=copies, donated=()), check=False, observe=None)
    times: list[float] = []
    for turn in range(WARM_UPS + rounds):
        started = time.perf_counter()
        jax.block_until_ready(run(leaves))
        jax.block_until_ready([copy.read() for copy in copies])
        if turn >= WARM_UPS:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _may_be_run(graph: Graph) -> bool:
    if any(isinstance(ref.type, HOST_HANDLES) for ref in graph.refs):
        return False
    return not any(effect is Effect.UNKNOWN for node in graph.nodes for effect, _ in node.effects)


def _copy(variable: Variable) -> Variable:
    if variable.device is None:
        return Variable(variable.read())
    with device_scope(variable.device):
        return Variable(variable.read())


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", "function"))


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} bytes"
