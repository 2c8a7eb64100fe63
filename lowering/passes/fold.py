"""Work out, once and for all, the numbers that decide what a host does.

XLA folds constants within a call. It sees no further: a number that a queue op takes, that picks the branch of a host,
or that another task needs would be computed by a call of its own in each step, and waited for. So this pass does
something only where a graph is cut into several calls. It takes whole numbers and booleans alone, and of these the ops
that have one result everywhere: a float may differ in its last bit from what XLA makes of it within a larger call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit

from dflow.lowering.discharge import discharge
from dflow.lowering.passes.prune import Prune
from dflow.tracing import ops
from dflow.tracing.attributes import Body, body_of, opaque_in
from dflow.tracing.device_name import split_device_name
from dflow.tracing.graph import Graph, Literal, Node, Operand, Value
from dflow.tracing.types import ArrayType

#: An array of more elements is left to the call that uses it.
LARGEST = 1024

_HOST_OPS = frozenset(ops.HOST_OPS)
_CALLS = frozenset(["jax.jit", "jax.pjit"])
_NAMES = """
    abs add and argmax argmin broadcast_in_dim clamp concatenate convert_element_type cummax cummin cumprod cumsum div
    eq ge gt iota le lt max min mul ne neg not or pad population_count reduce_and reduce_max reduce_min reduce_or
    reduce_prod reduce_sum rem reshape rev select_n shift_left shift_right_arithmetic shift_right_logical sign slice
    squeeze stop_gradient sub transpose xor
"""
_EXACT = _CALLS.union(f"jax.{name}" for name in _NAMES.split())


@dataclass(frozen=True)
class Fold:
    """Replace numbers that the task `local` would compute from literals alone by literals; take a known branch."""

    local: str
    name: ClassVar[str] = "fold"

    def __call__(self, graph: Graph) -> Graph:
        is_cut = len({node.device for node in graph.nodes}) > 1 or any(node.op in _HOST_OPS for node in graph.nodes)
        if not is_cut:
            return graph
        known = _evaluated(graph, self._constant_nodes(graph))
        if not known and not any(_branch(node) is not None for node in graph.nodes):
            return graph
        return Prune()(_with_known(graph, known))

    def _constant_nodes(self, graph: Graph) -> list[Node]:
        """The nodes that can be run now, in order."""
        found: dict[Value, None] = {}
        nodes = []
        for node in graph.nodes:
            if self._is_here(node.device) and all(value in found for value in node.values) and _is_exact(node):
                found.update(dict.fromkeys(node.outputs))
                nodes.append(node)
        return nodes

    def _is_here(self, device: str | None) -> bool:
        """Whether a device is of the caller's, and of the kind that works numbers out now."""
        task, local = split_device_name(device or self.local)
        return task == self.local and local.partition(":")[0] in ("", jax.default_backend())


def _is_exact(node: Node) -> bool:
    """Whether a node that is given small arrays gives the same everywhere, and that is small."""
    if node.op.declared or node.op.name not in _EXACT:
        return False
    if not all(_is_small_number(operand.type) for operand in (*node.inputs, *node.outputs)):
        return False
    if opaque_in(tuple(node.attributes.values())) is not None:
        return False
    return node.op.name not in _CALLS or _is_exact_body(node.attributes["jaxpr"])


def _is_exact_body(held: Any) -> bool:
    body = held if isinstance(held, Body) else body_of(held)
    return isinstance(body, Body) and not body.constants and all(map(_is_exact, body.graph.nodes))


def _is_small_number(type: Any) -> bool:
    if not isinstance(type, ArrayType) or jnp.issubdtype(type.dtype, jax.dtypes.extended):
        return False
    is_whole = type.dtype == np.bool_ or jnp.issubdtype(type.dtype, np.integer)
    return bool(is_whole) and math.prod(type.shape) <= LARGEST


def _evaluated(graph: Graph, nodes: list[Node]) -> dict[Value, Operand]:
    """The scalars that the nodes give to others, as literals; all by one program."""
    inside = {id(node) for node in nodes}
    made = {value for node in nodes for value in node.outputs if value.type.shape == ()}  # type: ignore[union-attr]
    used = {output for output in graph.outputs if output in made}
    for node in graph.nodes:
        if id(node) not in inside:
            used.update(value for value in node.values if value in made)
    wanted = [value for node in nodes for value in node.outputs if value in used]
    if not wanted:
        return {}
    # Literals go in as arguments: XLA's own folding of a division by none ends the process on the CPU.
    literals = {id(o): o for node in nodes for o in node.inputs if isinstance(o, Literal)}
    inputs = {key: Value(f"literal_{index}", literal.type) for index, (key, literal) in enumerate(literals.items())}
    over = [replace(node, inputs=tuple(inputs.get(id(o), o) for o in node.inputs)) for node in nodes]
    fn = discharge(Prune()(Graph(tuple(inputs.values()), tuple(over), tuple(wanted)))).fn
    with jax.ensure_compile_time_eval():
        numbers = jax.device_get(jax_jit(fn)(*(literal.array for literal in literals.values())))
    return {value: _literal(number, value.type) for value, number in zip(wanted, numbers, strict=True)}


def _literal(number: Any, type: Any) -> Literal:
    return Literal(np.asarray(number)[()], type)


def _branch(node: Node) -> Graph | None:
    """The body of a branch that will run, if that is known."""
    if node.op is not ops.ctrl_cond or not isinstance(node.inputs[0], Literal):
        return None
    index = int(np.asarray(node.inputs[0].value))
    return node.bodies[min(max(index, 0), len(node.bodies) - 1)]


def _with_known(graph: Graph, known: dict[Value, Operand]) -> Graph:
    """The graph over the known numbers, with the nodes of each known branch in the place of its own."""
    fresh = graph.fresh_names()
    known = dict(known)
    nodes: list[Node] = []
    for old in graph.nodes:
        node = old.with_operands(known)
        body = _branch(node)
        if body is None:
            nodes.append(node)
            continue
        inside: dict[Value, Operand] = dict(zip(body.inputs, node.handed, strict=True))
        for inner in body.nodes:
            outputs = tuple(Value(fresh(value.name), value.type) for value in inner.outputs)
            nodes.append(replace(inner.with_operands(inside), outputs=outputs))
            inside.update(zip(inner.outputs, outputs, strict=True))
        known.update(zip(node.array_outputs, _mapped(body.outputs, inside), strict=True))
    return Graph(graph.inputs, tuple(nodes), _mapped(graph.outputs, known))


def _mapped(operands: Iterable[Operand], new: Mapping[Value, Operand]) -> tuple[Operand, ...]:
    return tuple(new.get(operand, operand) if isinstance(operand, Value) else operand for operand in operands)
