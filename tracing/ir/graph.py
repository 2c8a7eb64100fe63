"""The graph: frozen values and nodes in program order.

A `Graph` is a list of nodes over named values. Nothing in it is ever changed; a pass makes a new one. Values and
nodes compare by identity, because two reads of one variable are two values. Variables come in as inputs of a `RefType`,
queues of a `QueueType`; a node that touches one says so by its op's effects, which is all that orders it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.types import HANDLES, ArrayType, RefType, TokenType, Type
from dflow.tracing.source import Loc


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A named value. `device` is where a variable lives; only graph inputs that are variables have one."""

    name: str
    type: Type
    device: str | None = None

    @property
    def is_variable(self) -> bool:
        """Whether it stands for a variable, rather than for an array or a queue."""
        return isinstance(self.type, RefType)

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, eq=False, slots=True)
class Literal:
    """A scalar written in the program."""

    value: Any
    type: ArrayType

    @property
    def array(self) -> jax.Array:
        """The scalar as an array of its type."""
        # A Python number is the one public way to an array of a weak type.
        value = np.asarray(self.value).item() if self.type.weak else self.value
        return jnp.asarray(value, None if self.type.weak else self.type.dtype)

    def __repr__(self) -> str:
        return f"{np.asarray(self.value).item()!r}:{self.type}"


Operand = Value | Literal


@dataclass(frozen=True, slots=True)
class Written:
    """The origin of a node of a parsed graph, whose line is all that is known. A trace gives its own.

    `loc`    the user's line, when it is known
    `scope`  the name scopes it was traced under, as JAX prints them: `dense/inner`, `transpose(jvp(dense))`
    """

    loc: Loc | None
    scope: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One op applied to operands.

    `attributes`  the op's parameters; of a JAX primitive, its params as JAX holds them
    `bodies`      the graphs an op runs: a cluster's one, the arms of a branch, what a loop repeats; each takes `handed`
    `device`      a task, `WITH_STATE`, or None for wherever the caller is
    `after`       values whose nodes must have run before, though none is an operand
    `origin`      the line it was traced from, and what JAX needs to bind it again (`loc` and `scope` as those of
                  `Written`); only the line is printed
    """

    op: OpDef
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    bodies: tuple[Graph, ...] = ()
    device: str | None = None
    after: tuple[Value, ...] = ()
    origin: Any = None

    @property
    def loc(self) -> Loc | None:
        """The user's line, when it is known."""
        loc: Loc | None = self.origin.loc if self.origin is not None else None
        return loc

    @property
    def scope(self) -> str:
        """The name scopes it was traced under; empty when there is none, or none is known."""
        return str(self.origin.scope) if self.origin is not None else ""

    @property
    def effects(self) -> tuple[tuple[Effect, Value | None], ...]:
        """Each effect with the variable it is on, or None when it is on none."""
        if self.bodies:
            return _effects_of_bodies(self)
        # A resource is never a literal.
        operands: Sequence[Any] = self.inputs
        return tuple((effect, None if index is None else operands[index]) for effect, index in self.op.declared)

    @property
    def has_effects(self) -> bool:
        """Whether the node or its body has an effect; of a malformed node too, for the verifier quotes those."""
        if self.bodies:
            return any(node.has_effects for body in self.bodies for node in body.nodes)
        return bool(self.op.declared)

    @property
    def handed(self) -> tuple[Operand, ...]:
        """The operands that each body takes, as they are or (of a scan) row by row."""
        return self.inputs[self.op.own_operands :]

    @property
    def must_run(self) -> bool:
        """Whether the node has a visible effect, so that it stays in the graph even if its results are unused."""
        if not self.bodies and not self.op.declared:
            return False
        return any(effect is not Effect.READ for effect, _ in self.effects)

    @property
    def values(self) -> list[Value]:
        """The operands that are values, not literals."""
        return [operand for operand in self.inputs if isinstance(operand, Value)]

    @property
    def array_outputs(self) -> tuple[Value, ...]:
        """The results that are arrays, without tokens."""
        return tuple(value for value in self.outputs if not isinstance(value.type, TokenType))

    def with_operands(self, new: Mapping[Value, Operand]) -> Node:
        """The same node on other operands, order edges included; itself when none is mapped."""
        if new.keys().isdisjoint(self.values) and new.keys().isdisjoint(self.after):
            return self
        inputs = tuple(new.get(operand, operand) if isinstance(operand, Value) else operand for operand in self.inputs)
        after = (new.get(value, value) for value in self.after)
        return replace(self, inputs=inputs, after=tuple(value for value in after if isinstance(value, Value)))

    def __repr__(self) -> str:
        return f"Node({', '.join(map(repr, self.outputs))} = {self.op.name})"


def _effects_of_bodies(node: Node) -> tuple[tuple[Effect, Value | None], ...]:
    """Return the effects of the nodes in the bodies, each once, on the operands of `node`."""
    found: dict[tuple[Effect, Value | None], None] = {}
    for body in node.bodies:
        outer = dict(zip(body.inputs, node.handed, strict=True))
        for inner in body.nodes:
            for effect, resource in inner.effects:
                operand: Any = None if resource is None else outer[resource]
                found[effect, operand] = None
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Graph:
    """Inputs, nodes in an order that respects every use and every effect, and outputs."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Operand, ...]

    @cached_property
    def producers(self) -> Mapping[Value, Node]:
        """The node that gives each value; graph inputs are not in it."""
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def uses(self) -> Mapping[Value, tuple[Node, ...]]:
        """The nodes that take each value as an operand, in order, each once."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.values:
                users = found.setdefault(value, [])
                if not users or users[-1] is not node:
                    users.append(node)
        return {value: tuple(nodes) for value, nodes in found.items()}

    @property
    def refs(self) -> tuple[Value, ...]:
        """The inputs that are variables and queues, in order."""
        return tuple(value for value in self.inputs if isinstance(value.type, HANDLES))

    def all_nodes(self) -> Iterator[Node]:
        """Yield each node, and then those of its bodies."""
        for node in self.nodes:
            yield node
            for body in node.bodies:
                yield from body.all_nodes()

    def part(self, nodes: Sequence[Node]) -> Graph:
        """Return some nodes as a graph, whose outputs are the results used outside.

        Its inputs are the operands from outside, variables and queues first.
        """
        made = dict.fromkeys(value for node in nodes for value in node.outputs)
        taken = dict.fromkeys(value for node in nodes for value in node.values if value not in made)
        inside, outputs = set(nodes), set(self.outputs)
        given = (value for value in made if value in outputs or not inside.issuperset(self.uses.get(value, ())))
        inputs = sorted(taken, key=lambda value: not isinstance(value.type, HANDLES))
        return Graph(tuple(inputs), tuple(nodes), tuple(given))

    def fresh_names(self) -> FreshNames:
        """A maker of value names that this graph does not have yet."""
        return FreshNames([*self.inputs, *(value for node in self.nodes for value in node.outputs)])

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes)} nodes, {len(self.inputs)} inputs, {len(self.outputs)} outputs>"


class FreshNames:
    """Gives names that are not taken: `x`, then `x_1`, `x_2`."""

    def __init__(self, taken: Iterable[Value] = ()) -> None:
        self._taken = {value.name for value in taken}
        self._counts: dict[str, int] = {}

    def __call__(self, wanted: str) -> str:
        name, count = wanted, self._counts.get(wanted, 0)
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._counts[wanted] = count
        self._taken.add(name)
        return name
