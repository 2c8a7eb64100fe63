"""Choose the devices of the nodes that are open to choice, so that the predicted time of a step is shortest.

`with dflow.device("auto")`, or a list of devices, marks these nodes. All others are placed by `Place` and take part in
the prediction with that placement. The time of a step is simulated (see `lowering/placement`) from costs measured on
the devices. In the body of a loop that waits for queues a marked node is placed as without a scope.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dflow.lowering.passes.order import order
from dflow.lowering.passes.place import Place
from dflow.lowering.placement.coarsen import coarsened
from dflow.lowering.placement.graph_problem import problem_of, runs_alone
from dflow.lowering.placement.measure import Meter
from dflow.lowering.placement.problem import Machine, Problem
from dflow.lowering.placement.search import Scored, all_on, choose, scored
from dflow.tracing.devices.device import choices_in
from dflow.tracing.devices.device_name import device_name, split_device_name
from dflow.tracing.ir.graph import Graph, Node
from dflow.tracing.ir.ops import CONTROL_OPS

#: Default time for pricing and search of one graph together, in s.
BUDGET_S = 3.0
#: Pricing takes at most this part of the budget, and the search the rest, at most this time in s.
PRICING, SEARCH_S = 0.7, 1.0
#: A choice must gain at least this part of a step over the choice of the default device for all nodes.
WORTH = 0.02
_OF_SEVERAL_DEVICES = ("shard_map", "sharding_constraint", "mesh_cast", "reshard")


@dataclass(frozen=True)
class Decision:
    """The devices chosen for a graph.

    `problem`    the units of the graph, and a machine with the names of the devices
    `groups`     the indices of the nodes of each unit
    `found`      the device of each unit, with its score
    `is_free`    by unit, whether there was a choice
    `pricing_s`  time to find the costs of the units and of the devices
    `search_s`   time of the search
    """

    problem: Problem
    groups: tuple[tuple[int, ...], ...]
    found: Scored
    is_free: tuple[bool, ...]
    pricing_s: float
    search_s: float


@dataclass(frozen=True)
class Choose:
    """Choose among the devices of `place` by `costs`."""

    place: Place
    costs: Meter
    budget_s: float = BUDGET_S
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, graph: Graph) -> Graph:
        if not may_choose(graph):
            return graph
        return settled(graph, self.decide(graph) if len(self.place.devices) > 1 else None)

    def decide(self, graph: Graph) -> Decision:
        """Return the best choice for a graph whose nodes still have theirs open."""
        assumed = order(self.place(self._with_default(graph)))
        open_to = [choices_in(node.device) if _is_free(node) else None for node in graph.nodes]
        stated = [split_device_name(node.device or "")[1] or self.place.devices[0] for node in assumed.nodes]
        names = self._names(open_to, stated)
        number_of = {name: number for number, name in enumerate(names)}
        where = [
            tuple(sorted(number_of[name] for name in ((own,) if choices is None else choices or names)))
            for choices, own in zip(open_to, stated, strict=True)
        ]
        started = self.clock()
        machine = self.costs.machine(names)
        measured = self.clock()
        groups, problem = self._problem(assumed, machine, where, number_of[self.place.devices[0]])
        priced = self.clock()
        until = min(measured + self.budget_s, priced + SEARCH_S)
        found = choose(problem, is_over=lambda: self.clock() > until)
        simple = scored(problem, all_on(problem, number_of[self.place.devices[0]]))
        if not simple.score[0] and simple.step_s <= found.step_s * (1 + WORTH):
            found = simple
        free = tuple(any(open_to[number] is not None for number in group) for group in groups)
        return Decision(problem, groups, found, free, priced - started, self.clock() - priced)

    def _problem(
        self, graph: Graph, machine: Machine, where: Sequence[tuple[int, ...]], home: int
    ) -> tuple[tuple[tuple[int, ...], ...], Problem]:
        """Return the indices of the nodes of each unit, and the problem. `where` are the devices of each node."""
        names = machine.names
        kinds = [None if runs_alone(node) else devices for node, devices in zip(graph.nodes, where, strict=True)]
        seconds = [self.costs.estimate(node, names[0]) for node in graph.nodes]
        groups = coarsened(graph, seconds, kinds, _small(machine))
        parts = [graph.part([graph.nodes[number] for number in group]) for group in groups]
        prices = self.costs.prices(parts, names, PRICING * self.budget_s)
        return groups, problem_of(graph, parts, prices, [where[group[0]] for group in groups], machine, home)

    def _names(self, open_to: Sequence[tuple[str, ...] | None], stated: Sequence[str]) -> tuple[str, ...]:
        """Return the devices to consider, in the caller's order: those used or named; all, if a node allows any."""
        if any(choices == () for choices in open_to):
            return self.place.devices
        used = {*stated, *(name for choices in open_to for name in choices or ()), self.place.devices[0]}
        return tuple(name for name in self.place.devices if name in used)

    def _with_default(self, graph: Graph) -> Graph:
        default = device_name("", self.place.devices[0])
        nodes = (_settled(node, default if _is_free(node) else None) for node in graph.nodes)
        return replace(graph, nodes=tuple(nodes))


def settled(graph: Graph, decision: Decision | None) -> Graph:
    """Return the graph with the decision applied; with None, its open nodes are placed like nodes without a scope."""
    chosen = {} if decision is None else _devices(decision)
    nodes = (_settled(node, chosen.get(number)) for number, node in enumerate(graph.nodes))
    return replace(graph, nodes=tuple(nodes))


def may_choose(graph: Graph) -> bool:
    """Whether any node of the graph or of its bodies is open to a choice of device."""
    return any(choices_in(node.device) is not None for node in graph.all_nodes())


def _is_free(node: Node) -> bool:
    """Whether a node is open to a choice, touches no variable or resource, and is run by XLA on a single device."""
    if choices_in(node.device) is None or runs_alone(node):
        return False
    name = node.op.primitive.name if node.op.primitive is not None else ""
    return not any(ref is not None for _, ref in node.effects) and name not in _OF_SEVERAL_DEVICES


def _settled(node: Node, device: str | None) -> Node:
    """Return the node on `device`, if it is open to a choice, and without open choices in its bodies."""
    if node.op in CONTROL_OPS and any(map(may_choose, node.bodies)):
        bodies = (replace(body, nodes=tuple(_settled(inner, None) for inner in body.nodes)) for body in node.bodies)
        node = replace(node, bodies=tuple(bodies))
    return replace(node, device=device) if choices_in(node.device) is not None else node


def _devices(decision: Decision) -> dict[int, str]:
    """Return the device of each free node, by the node's index."""
    names, found = decision.problem.machine.names, decision.found.assignment
    return {
        number: device_name("", names[found[unit]])
        for unit, group in enumerate(decision.groups)
        for number in group
        if decision.is_free[unit]
    }


def _small(machine: Machine) -> float:
    """Return the shortest latency of a link, in s: work that takes less time is not worth a transfer."""
    links = [machine.links[a][b] for a in machine.devices for b in machine.devices if a != b]
    return min((link.latency_s for link in links), default=float("inf"))
