"""Make a `Problem` of a graph whose nodes are placed or open to a choice of device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dflow.lowering.placement.coarsen import coarsened
from dflow.lowering.placement.problem import Machine, Moved, Problem, Unit
from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.types import HANDLES, ArrayType, RefType, TokenType


@dataclass(frozen=True)
class Price:
    """The time of a unit on each device, in s, and the scratch memory that it needs, in bytes."""

    seconds: tuple[float, ...]
    scratch_bytes: int = 0


@dataclass(frozen=True)
class Instance:
    """A problem, with its graph and the indices of the nodes of each unit."""

    graph: Graph
    groups: tuple[tuple[int, ...], ...]
    problem: Problem

    def nodes(self, unit: int) -> list[Node]:
        """Return the nodes of a unit."""
        return [self.graph.nodes[number] for number in self.groups[unit]]


def instance(
    graph: Graph,
    machine: Machine,
    home: int,
    devices_of: Callable[[Node], tuple[int, ...]],
    estimate: Callable[[Node], float],
    prices: Callable[[Sequence[Graph]], Sequence[Price]],
    small_s: float,
) -> Instance:
    """Return the problem of placing a graph, whose effects are in order edges.

    home        index of the device that holds the arguments
    devices_of  returns the devices where a node may be
    estimate    returns a rough time of a node, in s
    prices      returns the costs of the parts of the graph that become units
    small_s     nodes that take less time than this are small, see `coarsened`
    """
    choices = [devices_of(node) for node in graph.nodes]
    kinds = [None if runs_alone(node) else where for node, where in zip(graph.nodes, choices, strict=True)]
    groups = coarsened(graph, [estimate(node) for node in graph.nodes], kinds, small_s)
    parts = [part(graph, [graph.nodes[number] for number in group]) for group in groups]
    priced = prices(parts)
    unit_of = {value: unit for unit, body in enumerate(parts) for node in body.nodes for value in node.outputs}
    values, number_of = _values(graph, parts, unit_of, home)
    state = _state(graph, parts)
    units = tuple(
        Unit(
            _name(body),
            price.seconds,
            tuple(number_of[value] for value in body.inputs if value in number_of),
            _after(unit, body, unit_of),
            choices[group[0]],
            price.scratch_bytes,
            state[unit],
            any(node.effects for node in body.nodes),
        )
        for unit, (group, body, price) in enumerate(zip(groups, parts, priced, strict=True))
    )
    return Instance(graph, groups, Problem(machine, units, values))


def runs_alone(node: Node) -> bool:
    """Whether a node is a host node, or has unknown effects."""
    return node.op in ops.HOST_OPS or any(effect is Effect.UNKNOWN for effect, _ in node.effects)


def part(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """Return some nodes as a graph: its inputs are their operands from outside, its outputs the values used outside."""
    made = {value for node in nodes for value in node.outputs}
    taken = dict.fromkeys(value for node in nodes for value in node.values if value not in made)
    inside = {id(node) for node in nodes}
    outputs = {output for output in graph.outputs if isinstance(output, Value)}
    given = tuple(
        value
        for node in nodes
        for value in node.array_outputs
        if value in outputs or any(id(user) not in inside for user in graph.uses.get(value, ()))
    )
    handles = [value for value in taken if isinstance(value.type, HANDLES)]
    arrays = [value for value in taken if not isinstance(value.type, HANDLES)]
    return Graph((*handles, *arrays), tuple(nodes), given)


def _values(
    graph: Graph, parts: Sequence[Graph], unit_of: Mapping[Value, int], home: int
) -> tuple[tuple[Moved, ...], dict[Value, int]]:
    outputs = {output for output in graph.outputs if isinstance(output, Value)}
    inputs = [value for value in graph.inputs if not isinstance(value.type, HANDLES)]
    found: list[Moved] = []
    number_of: dict[Value, int] = {}
    given = [value for body in parts for value in body.outputs if isinstance(value, Value)]
    for value in (*inputs, *given):
        assert isinstance(value.type, ArrayType)
        number_of[value] = len(found)
        producer = unit_of.get(value)
        found.append(Moved(value.type.size_bytes, producer, home if producer is None else None, value in outputs))
    return tuple(found), number_of


def _after(unit: int, body: Graph, unit_of: Mapping[Value, int]) -> tuple[int, ...]:
    """Return the units before a unit, by order edges and by tokens, which are no values of the problem."""
    earlier = (unit_of[value] for node in body.nodes for value in node.after if value in unit_of)
    tokens = (unit_of[v] for node in body.nodes for v in node.values if isinstance(v.type, TokenType))
    return tuple(dict.fromkeys(other for other in (*earlier, *tokens) if other != unit))


def _state(graph: Graph, parts: Sequence[Graph]) -> list[int]:
    """Return the bytes of variables of each unit; a variable counts for the first unit that uses it."""
    found, counted = [0] * len(parts), set()
    for unit, body in enumerate(parts):
        for ref in body.refs:
            if isinstance(ref.type, RefType) and ref not in counted:
                counted.add(ref)
                found[unit] += ref.type.of.size_bytes
    return found


def _name(body: Graph) -> str:
    return body.nodes[-1].outputs[0].name
