"""Make a `Problem` of the parts of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflow.lowering.placement.problem import Machine, Moved, Problem, Unit
from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Node, Operand, Value
from dflow.tracing.ir.types import ArrayType, RefType


@dataclass(frozen=True)
class Price:
    """The time of a part on each device, in s, and the scratch memory that it needs, in bytes."""

    seconds: tuple[float, ...]
    scratch_bytes: int = 0


def runs_alone(node: Node) -> bool:
    """Whether a node is a host node, or has unknown effects."""
    return node.op in ops.HOST_OPS or any(effect is Effect.UNKNOWN for effect, _ in node.effects)


def problem_of(
    graph: Graph,
    parts: Sequence[Graph],
    prices: Sequence[Price],
    devices: Sequence[tuple[int, ...]],
    machine: Machine,
    home: int,
) -> Problem:
    """Return the problem of placing a graph, whose effects are in order edges. Its units are these parts of the graph.

    devices  for each part, the indices of the devices where it may run
    home     index of the device that holds the arguments
    """
    unit_of: dict[Operand, int] = {
        value: unit for unit, part in enumerate(parts) for node in part.nodes for value in node.outputs
    }
    outputs, values, number_of = set(graph.outputs), list[Moved](), dict[Operand, int]()
    for value in (*graph.inputs, *(output for part in parts for output in part.outputs)):
        if isinstance(value.type, ArrayType):
            number_of[value] = len(values)
            producer = unit_of.get(value)
            values.append(Moved(value.type.size_bytes, producer, home if producer is None else None, value in outputs))
    units, counted = list[Unit](), set[Value]()
    for part, price, allowed in zip(parts, prices, devices, strict=True):
        earlier = dict.fromkeys(unit_of[value] for node in part.nodes for value in node.after if value in unit_of)
        # The bytes of a variable count for the first unit that uses it.
        state = [ref.type.of.size_bytes for ref in part.refs if isinstance(ref.type, RefType) and ref not in counted]
        counted.update(part.refs)
        units.append(
            Unit(
                price.seconds,
                tuple(number_of[value] for value in part.inputs if value in number_of),
                tuple(unit for unit in earlier if unit != len(units)),
                allowed,
                price.scratch_bytes,
                sum(state),
                any(node.effects for node in part.nodes),
            )
        )
    return Problem(machine, tuple(units), tuple(values))
