"""`dflow.explain_placement`: the device of each part of a function, the reason, and the time of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax

from dflow.calls.function import Function
from dflow.calls.planner import Planner
from dflow.config import CONFIG
from dflow.lowering.local import METER
from dflow.lowering.passes.base import run_passes
from dflow.lowering.passes.choose import Choose, Decision, settled
from dflow.lowering.passes.place import Place
from dflow.lowering.pipeline import ALONE, SIMPLIFY, pipeline
from dflow.lowering.placement.graph_problem import runs_alone
from dflow.lowering.placement.search import all_on, alternatives, predicted, scored
from dflow.lowering.placement.timeline import timeline
from dflow.lowering.values.devices import devices_in_order
from dflow.state_backends import LOCAL, home_of
from dflow.tracing.devices.device import WITH_STATE, choices_in, device_scope
from dflow.tracing.devices.device_name import split_device_name
from dflow.tracing.errors import DeviceError
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Node
from dflow.tracing.ir.types import HOST_HANDLES
from dflow.tracing.jax_frontend import runs_plainly
from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.near_names import keywords_of, refuse_keywords
from dflow.tracing.source import at, caller
from dflow.tracing.state.context import default_home, home
from dflow.tracing.state.resources import Variable

#: One measurement is a row of calls that takes about `ROW_S` seconds, of at most `ROW` calls.
ROW_S, ROW = 0.02, 100
_OPTIONS = ("rounds", "budget_s")
_WITH_VARIABLES = "variables that live there"


@dataclass(frozen=True)
class PlacedPart:
    """Ops that are listed together because they have the same device and reason.

    values    name of each op's first result, as in the graph's text
    device    where the ops run, such as `cpu:1`
    reason    why they run there
    lines     the first of the user's lines that they come from, then "..." if there are more
    is_state  whether a variable determines their device
    """

    values: tuple[str, ...]
    device: str
    reason: str
    lines: tuple[str, ...]
    is_state: bool


@dataclass(frozen=True)
class Placement:
    """The device of each op of a function, and why; its `str` is a table. Made by `dflow.explain_placement`.

    predicted_s     predicted time of a step, in s
    measured_s      median measured time of a step in a loop, in s; None if it was not run
    all_on_one_s    by device: predicted time of a step, in s, with all ops there that may run there
    busy_s          by device: time that it works in a step, in s
    peak_bytes      by device: most memory that a step needs there, variables included
    transfers       number of values copied between devices in a step
    moved_bytes     their total size in bytes
    late_bytes      for each device where delaying copies saves memory: its peak in bytes without and with delays
    pricing_s       time to estimate the ops' costs, and to measure the devices if that was needed, in s
    search_s        time of the search for the best placement, in s
    parts           the ops in program order; each op is in exactly one part
    """

    name: str
    predicted_s: float
    measured_s: float | None
    all_on_one_s: dict[str, float]
    busy_s: dict[str, float]
    peak_bytes: dict[str, int]
    transfers: int
    moved_bytes: int
    late_bytes: dict[str, tuple[int, int]]
    pricing_s: float
    search_s: float
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
        lines += [
            f"  copies that are asked for late keep {device} at {_size(late)} instead of {_size(at_once)}"
            for device, (at_once, late) in self.late_bytes.items()
        ]
        if len(self.all_on_one_s) > 1:
            others = ", ".join(f"{_time(seconds)} on {device}" for device, seconds in self.all_on_one_s.items())
            lines.append(f"  as far as it may be on one device, it would take {others}")
        lines.append(f"  pricing took {_time(self.pricing_s)}, the search {_time(self.search_s)}")
        return lines

    def _rows(self) -> list[str]:
        named = [_named(part.values) for part in self.parts]
        widths = max(map(len, named), default=0), max((len(part.device) for part in self.parts), default=0)
        return [
            f"{values:<{widths[0]}}  {part.device:<{widths[1]}}  {part.reason}"
            + (f"  # {', '.join(part.lines)}" if part.lines else "")
            for values, part in zip(named, self.parts, strict=True)
        ]


def _named(values: Sequence[str]) -> str:
    if len(values) <= 2:
        return ", ".join(f"%{value}" for value in values)
    return f"%{values[0]} to %{values[-1]}, {len(values)} ops"


def explain_placement(
    fn: Callable[..., Any], /, *args: Any, rounds: int = 5, budget_s: float | None = None, **kwargs: Any
) -> Placement:
    """Report where the ops of `fn` run for these types of arguments, and why; predict and measure a step's time.

    fn        a function of one process, decorated by `dflow.jit` or not
    args      its arguments, like `kwargs`: arrays, or `jax.ShapeDtypeStruct`s, with which it is not run
    rounds    number of measurements, at least 0. Each calls the function in a loop, up to 100 times, on copies of its
              variables, so that nothing changes. It is not run with 0, or if it uses queues or has outside effects
    budget_s  time limit of pricing and search, in s; default DFLOW_PLACEMENT_S, or else 3
    raises    DeviceError for a function with variables on a cluster; ValueError for a wrong `rounds` or `budget_s`;
              TypeError if `fn` is not callable, or for a keyword that neither this nor the function takes; and any
              error that a call would raise

    The ops under `dflow.device("auto")` are placed by the search. For each such part, the report has the increase of
    the step's time on the next best device. The first call in a process measures the devices, for about a second.
    """
    given: object = rounds
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(f"rounds is {rounds!r}{at(caller())}\n  give a whole number, 0 for a prediction alone")
    if budget_s is not None and not 0 < budget_s < float("inf"):
        raise ValueError(f"budget_s is {budget_s!r}{at(caller())}\n  give a number of seconds above 0, or leave it out")
    if not callable(fn):
        raise TypeError(f"explain_placement was given {fn!r}, which is no function{at(caller())}")
    refuse_keywords("explain_placement", kwargs, [*_OPTIONS, *keywords_of(fn, kwargs)], _OPTIONS)
    with jax.disable_jit(False):  # also within `dflow.eager()`, explain the compiled function
        return _explained(fn, args, kwargs, rounds, CONFIG.placement_s if budget_s is None else budget_s)


def _explained(fn: Callable[..., Any], args: Any, kwargs: Any, rounds: int, budget_s: float) -> Placement:
    rehearsed = _Rehearsed(fn.fn, fn._options) if isinstance(fn, Function) else _Rehearsed(fn, {})
    traced = rehearsed.bound(args, kwargs)
    if not home_of(traced).is_local:
        raise DeviceError(
            f"{traced.name} has variables on a cluster, and costs are of the devices of one process",
            "print(dflow.graph(fn, ...)) shows the task of each op",
        )
    graph = run_passes(traced.graph, SIMPLIFY)
    decision = Choose(Place(ALONE, (ALONE,), devices_in_order()), METER, budget_s).decide(graph)
    measured_s = None
    if rounds and _may_be_run(traced, (args, kwargs)):
        rehearsed.follow(traced, settled(graph, decision))
        measured_s = rehearsed.step_s(args, kwargs, rounds)
    return explained(traced.name, graph, decision, measured_s)


def explained(name: str, graph: Graph, decision: Decision, measured_s: float | None) -> Placement:
    """Return the placement of `graph`, whose choices are still open, under this decision."""
    problem, found = decision.problem, decision.found
    names = problem.machine.names
    step = predicted(problem, found.assignment)
    used = [device for device in problem.machine.devices if step.busy_s[device] or step.peak_bytes[device]]
    return Placement(
        name,
        step.step_s,
        measured_s,
        {names[device]: scored(problem, all_on(problem, device)).step_s for device in problem.machine.devices},
        {names[device]: step.busy_s[device] for device in used},
        {names[device]: step.peak_bytes[device] for device in used},
        len(step.transfers),
        sum(problem.values[move.value].size_bytes for move in step.transfers),
        _late_bytes(settled(graph, decision), names),
        decision.pricing_s,
        decision.search_s,
        tuple(_parts(graph, decision)),
    )


def _late_bytes(graph: Graph, devices: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return the peak bytes that the pass `schedule` saves, by its own estimate: before and after, by device."""
    lowered: dict[str, Graph] = {}
    run_passes(graph, pipeline(devices=devices), observe=lowered.__setitem__)
    before, after = (timeline(lowered[name]).peak_bytes for name in ("cluster", "schedule"))
    return {
        split_device_name(device)[1]: (held, after[device]) for device, held in before.items() if after[device] < held
    }


def _parts(graph: Graph, decision: Decision) -> Iterator[PlacedPart]:
    """Yield one part for each region placed by the search, and one for consecutive other ops with the same reason."""
    chosen = _chosen(decision)
    unit_of = {number: unit for unit, group in enumerate(decision.groups) for number in group}
    names = decision.problem.machine.names
    found: list[tuple[tuple[str, str, int], list[Node]]] = []
    position_of: dict[tuple[str, str, int], int] = {}
    for number, node in enumerate(graph.nodes):
        unit = unit_of[number]
        key = (names[decision.found.assignment[unit]], *chosen.get(unit, (_reason(node), -1)))
        if key in position_of and (key[2] >= 0 or position_of[key] == len(found) - 1):
            found[position_of[key]][1].append(node)
        else:
            position_of[key] = len(found)
            found.append((key, [node]))
    for (device, reason, _), nodes in found:
        lines = list(dict.fromkeys(node.loc.short for node in nodes if node.loc is not None))
        shown = (*lines[:2], "...") if len(lines) > 2 else tuple(lines)
        refs = dict.fromkeys(ref.name for node in nodes for _, ref in node.effects if ref is not None)
        is_state = reason == _WITH_VARIABLES
        reason = f"%{next(iter(refs))} lives there" if is_state and len(refs) == 1 else reason
        yield PlacedPart(tuple(node.outputs[0].name for node in nodes), device, reason, shown, is_state)


def _chosen(decision: Decision) -> dict[int, tuple[str, int]]:
    """Return, for each unit placed by the search, the reason for its device and the number of its region."""
    problem, assignment = decision.problem, decision.found.assignment
    found = {}
    for number, (region, device, loss_s) in enumerate(alternatives(problem, assignment)):
        gain = f"ends {_time(loss_s)} earlier than" if loss_s > 0 else "ends as early as"
        reason = f"chosen: the step {gain} with {problem.machine.names[device]}"
        found.update(dict.fromkeys(region, (reason, number)))
    return found


def _reason(node: Node) -> str:
    """Return why a node runs where it does, if the search did not place it."""
    if runs_alone(node):
        return "run by the process itself"
    if any(ref is not None for _, ref in node.effects):
        return _WITH_VARIABLES
    if node.device is None:
        return "no scope: beside what it takes"
    if choices_in(node.device) is not None:
        return "the only device that it may run on"
    return "stated" if node.device != WITH_STATE else "beside the variable that it updates"


class _RehearsalPlanner(Planner):
    """Plans the steps of a function on copies of its variables, with the devices of a decision."""

    followed: Traced | None = None

    def traced(self, stage: Any, args: Any, kwargs: Any) -> Traced:
        """Return the graph to follow, if set, else the graph of the trace."""
        return self.followed or super().traced(stage, args, kwargs)


class _Rehearsed(Function[..., Any]):
    """A compiled function that runs on copies of its variables, with the devices of a decision."""

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any]) -> None:
        # Without donation, since the same arguments are passed to the next call.
        super().__init__(fn, {name: given for name, given in options.items() if not name.startswith("donate")})
        self._copies: tuple[Variable, ...] = ()

    def _new_planner(self) -> _RehearsalPlanner:
        # Own traces, since no other function may run on the copies.
        self._rehearsal = _RehearsalPlanner(self.fn, self._options, self._jitted, self._new_traces())
        return self._rehearsal

    def bound(self, args: Any, kwargs: Any) -> Traced:
        args, kwargs = self._with_handles(args, kwargs)
        return self._rehearsal.traced(self._rehearsal.trace(args, kwargs), args, kwargs)

    def follow(self, traced: Traced, graph: Graph) -> None:
        """From now on run `graph`, the trace's graph with all devices settled, on copies of the current values."""
        with home(default_home()):
            self._copies = tuple(map(_copy, traced.variables))
        self._rehearsal.followed = replace(traced, graph=graph, variables=self._copies)

    def step_s(self, args: Any, kwargs: Any, rounds: int) -> float:
        """Return the median time of a call, in s, in loops of calls that wait only at the end, like a training loop."""
        self._loop_s(args, kwargs, 2)  # the first call compiles, the second warms up
        once = self._loop_s(args, kwargs, 1)
        count = max(1, min(ROW, int(ROW_S / max(once, 1e-9))))
        return statistics.median(self._loop_s(args, kwargs, count) / count for _ in range(rounds))

    def _loop_s(self, args: Any, kwargs: Any, count: int) -> float:
        keys = [copy.key for copy in self._copies]
        result, started = None, time.perf_counter()
        for _ in range(count):
            result = self(*args, **kwargs)
        jax.block_until_ready(result)
        LOCAL.store.wait(keys)
        return time.perf_counter() - started


def _may_be_run(traced: Traced, given: Any) -> bool:
    """Whether it can be run and would be compiled: arguments are values, and only variables change."""
    graph = traced.graph
    if not runs_plainly() or any(isinstance(ref.type, HOST_HANDLES) for ref in graph.refs):
        return False
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree_util.tree_leaves(given)):
        return False
    return not any(effect is Effect.UNKNOWN for node in graph.nodes for effect, _ in node.effects)


def _copy(variable: Variable) -> Variable:
    with nullcontext() if variable.device is None else device_scope(variable.device):
        return Variable(variable.read())


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
