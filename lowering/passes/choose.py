"""Give each node that may choose its device the one with which a step is predicted to be shortest.

`with dflow.device("auto")`, or a list of devices, marks the nodes. All others are where `Place` puts them, and count as
they stand there. What a step takes is simulated (see `lowering/placement`), from costs measured on the devices. In the
body of a loop that waits for queues such a node goes where it would without a scope.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from dflow.lowering.passes.order import Order
from dflow.lowering.passes.place import Place
from dflow.lowering.placement.choose import TURNS, all_on, choose
from dflow.lowering.placement.instance import Instance, Price, instance, runs_alone
from dflow.lowering.placement.problem import Machine
from dflow.lowering.placement.score import Scored, scored
from dflow.tracing.device import choices_in
from dflow.tracing.device_name import device_name, split_device_name
from dflow.tracing.graph import Graph, Node
from dflow.tracing.op import OpDef
from dflow.tracing.ops import CONTROL_OPS

#: How long pricing and search take together for one graph if nobody says otherwise, in s.
BUDGET_S = 3.0
#: The part of this that pricing may take at most; the search has the rest, and takes no longer than a second of it.
PRICING, SEARCH_S = 0.7, 1.0
#: What is predicted to gain less than this part of a step, over all on the default device, is not done.
WORTH = 0.02
_OF_SEVERAL_DEVICES = ("shard_map", "sharding_constraint", "mesh_cast", "reshard")


class Costs(Protocol):
    """What devices cost: `placement.measure.Meter`, or figures that are given."""

    def machine(self, names: Sequence[str]) -> Machine:
        """The devices of these names."""
        ...

    def estimate(self, node: Node, name: str) -> float:
        """Roughly what a node takes on a device, in s."""
        ...

    def prices(self, parts: Sequence[Graph], names: Sequence[str], budget_s: float) -> list[Price]:
        """What parts of a graph take on each device, found out within about so many s."""
        ...


@dataclass(frozen=True)
class Decision:
    """What was chosen for a graph: `found` for the units of `instance`, whose machine's names are the devices'.

    `is_free`    by unit, whether there was a choice
    `pricing_s`  how long it took to find out what the units cost, the devices included
    `search_s`   how long the search took
    """

    instance: Instance
    found: Scored
    is_free: tuple[bool, ...]
    pricing_s: float
    search_s: float


@dataclass(frozen=True)
class Choose:
    """Choose among the devices of `place`, at the costs given."""

    place: Place
    costs: Costs
    budget_s: float = BUDGET_S
    clock: Callable[[], float] = time.perf_counter
    name: ClassVar[str] = "choose"
    is_of_whole: ClassVar[bool] = True

    def __call__(self, graph: Graph) -> Graph:
        if not may_choose(graph):
            return graph
        return settled(graph, self.decide(graph) if len(self.place.devices) > 1 else None)

    def decide(self, graph: Graph) -> Decision:
        """What is best for the graph, whose choices are still open."""
        assumed = Order()(self.place(self._with_default(graph)))
        open_to = [choices_in(node.device) if _is_free(node) else None for node in graph.nodes]
        stated = [split_device_name(node.device or "")[1] or self.place.devices[0] for node in assumed.nodes]
        names = self._names(open_to, stated)
        number_of = {name: number for number, name in enumerate(names)}
        where = {}
        for node, choices, own in zip(assumed.nodes, open_to, stated, strict=True):
            allowed = (own,) if choices is None else choices or names
            where[id(node)] = tuple(sorted(number_of[name] for name in allowed))
        started = self.clock()
        machine = self.costs.machine(names)
        measured = self.clock()
        problem = instance(
            assumed,
            machine,
            number_of[self.place.devices[0]],
            lambda node: where[id(node)],
            lambda node: self.costs.estimate(node, names[0]),
            lambda parts: self.costs.prices(parts, names, PRICING * self.budget_s),
            _small(machine),
        )
        priced = self.clock()
        until = min(measured + self.budget_s, priced + SEARCH_S)
        found = choose(problem.problem, turns=TURNS, is_over=lambda: self.clock() > until)
        simple = scored(problem.problem, all_on(problem.problem, number_of[self.place.devices[0]]))
        if not simple.score[0] and simple.step_s <= found.step_s * (1 + WORTH):
            found = simple
        free = tuple(any(open_to[number] is not None for number in group) for group in problem.groups)
        return Decision(problem, found, free, priced - started, self.clock() - priced)

    def _names(self, open_to: Sequence[tuple[str, ...] | None], stated: Sequence[str]) -> tuple[str, ...]:
        """The devices that count, in the caller's order: those used, those named, and all if any will do."""
        if any(choices == () for choices in open_to):
            return self.place.devices
        used = {*stated, *(name for choices in open_to for name in choices or ()), self.place.devices[0]}
        return tuple(name for name in self.place.devices if name in used)

    def _with_default(self, graph: Graph) -> Graph:
        default = device_name("", self.place.devices[0])
        nodes = (_settled(node, default if _is_free(node) else None) for node in graph.nodes)
        return replace(graph, nodes=tuple(nodes))


def settled(graph: Graph, decision: Decision | None) -> Graph:
    """The graph with each choice made as was decided; with None, left to the placement of what states nothing."""
    chosen = {} if decision is None else _devices(decision)
    nodes = (_settled(node, chosen.get(number)) for number, node in enumerate(graph.nodes))
    return replace(graph, nodes=tuple(nodes))


def may_choose(graph: Graph) -> bool:
    """Whether any node of the graph or of its bodies is to choose its device."""
    return any(
        choices_in(node.device) is not None or any(may_choose(body) for body in node.bodies) for node in graph.nodes
    )


def _is_free(node: Node) -> bool:
    """Whether the device of a node is to be chosen, and can be: its state is nowhere, and XLA runs it on one device."""
    if choices_in(node.device) is None or runs_alone(node):
        return False
    return not any(ref is not None for _, ref in node.effects) and not _is_of_several_devices(node.op)


def _is_of_several_devices(op: OpDef) -> bool:
    return op.primitive is not None and op.primitive.name in _OF_SEVERAL_DEVICES


def _settled(node: Node, device: str | None) -> Node:
    """The node on a device, if it is to choose one, with nothing left to choose in its bodies."""
    if node.op in CONTROL_OPS and any(map(may_choose, node.bodies)):
        bodies = (replace(body, nodes=tuple(_settled(inner, None) for inner in body.nodes)) for body in node.bodies)
        node = replace(node, bodies=tuple(bodies))
    return replace(node, device=device) if choices_in(node.device) is not None else node


def _devices(decision: Decision) -> dict[int, str]:
    """By the number of each free node, its device."""
    names, found = decision.instance.problem.machine.names, decision.found.assignment
    return {
        number: device_name("", names[found[unit]])
        for unit, group in enumerate(decision.instance.groups)
        for number in group
        if decision.is_free[unit]
    }


def _small(machine: Machine) -> float:
    """What is over before a value has travelled is not worth one."""
    links = [machine.links[a][b] for a in machine.devices for b in machine.devices if a != b]
    return min((link.latency_s for link in links), default=float("inf"))
