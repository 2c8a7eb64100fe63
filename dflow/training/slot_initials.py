"""Initial values of an optimizer's slots, as ops where they do not depend on the parameters.

Why: a zero momentum is best created where its variable lives, rather than computed here and sent. Slots with the same
initial value, as most have, share one initialiser, which is traced once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dflow.lowering.programs.discharge import Discharged, discharge
from dflow.lowering.programs.initial_ops import InitialOps
from dflow.lowering.programs.shared_exports import computation
from dflow.tracing.errors import VariableError
from dflow.tracing.ir.graph import Graph, Literal, Node, Operand, Value
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.state.initial_value import TypedInitial


class _Computed(TypedInitial):
    """An initial value that depends on the parameters, computed from their values on demand.

    Not within a trace: all slots share what was computed, and a value of one trace has no meaning outside of it. Raises
    VariableError there, so that the value is computed and then moved to the devices of the slot.
    """

    def __init__(self, type: ArrayType, value: Callable[[], Any]) -> None:
        self.type, self._value = type, value

    def __call__(self) -> Any:
        if is_tracing():
            raise VariableError(f"the initial value of a slot of {self.type} is computed from variables, not traced")
        return self._value()


def initials_of(graph: Graph, values: Callable[[], Sequence[Any]]) -> list[TypedInitial]:
    """Return the initialiser of each output of a graph. `values` computes all outputs, if one is needed by value."""
    made_by = {value: (place, node) for place, node in enumerate(graph.nodes) for value in node.outputs}
    # An entry keeps its program alive, because parts of the key are identities of the objects that it holds.
    shared: dict[Hashable, tuple[Discharged, InitialOps]] = {}
    once = functools.cache(values)

    def initial(place: int, output: Operand) -> TypedInitial:
        type = output.type
        assert isinstance(type, ArrayType)
        nodes = _behind(output, made_by)
        if nodes is None:
            return _Computed(type.strong, lambda: once()[place])
        pure = discharge(Graph((), tuple(nodes), (output,)))
        key = output if (found := computation(pure)) is None else found
        if key not in shared:
            shared[key] = pure, InitialOps(lambda: pure.fn()[0] if nodes else jnp.asarray(pure.fn()[0], type.dtype))
        return shared[key][1]

    return [initial(place, output) for place, output in enumerate(graph.outputs)]


def _behind(output: Operand, made_by: Mapping[Value, tuple[int, Node]]) -> Sequence[Node] | None:
    """Return the nodes that compute an output, in order; None if one of them depends on an input of the graph."""
    found: dict[int, Node] = {}
    wanted = [output]
    while wanted:
        value = wanted.pop()
        if isinstance(value, Literal):
            continue
        if value not in made_by:
            return None
        place, node = made_by[value]
        if place not in found:
            found[place] = node
            wanted += [*node.inputs, *node.values]
    return [found[place] for place in sorted(found)]
