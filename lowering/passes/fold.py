"""Compute at compile time the constants that host nodes or other tasks need.

XLA folds constants within a call, but not beyond it. A number that a queue op takes, that is the index of a branch run
by the host, or that another task needs would take a separate call in each step, and a wait for it. So this pass acts
only on graphs cut into several calls. It evaluates ops on integers and booleans alone, and only those with the same
result everywhere: a float might differ in its last bit from XLA's result within a larger call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit

from dflow.lowering.passes.prune import prune
from dflow.lowering.programs.discharge import discharge
from dflow.tracing.devices.device_name import split_device_name
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Literal, Node, Operand, Value
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jaxprs.attributes import Body, body_of, opaque_in

#: Arrays of more elements are not evaluated here.
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


def fold(graph: Graph, local: str) -> Graph:
    """Replace numbers that the task `local` would compute from literals by literals; inline branches of known index."""
    is_cut = len({node.device for node in graph.nodes}) > 1 or any(node.op in _HOST_OPS for node in graph.nodes)
    if not is_cut:
        return graph
    known = _evaluated(graph, _constant_nodes(graph, local))
    if not known and not any(_branch(node) is not None for node in graph.nodes):
        return graph
    return prune(_with_known(graph, known))


def _constant_nodes(graph: Graph, local: str) -> list[Node]:
    """Return the nodes that can be evaluated now, in order: on the task `local`, by JAX's default backend."""
    found: dict[Value, None] = {}
    nodes = []
    for node in graph.nodes:
        task, device = split_device_name(node.device or local)
        is_here = task == local and device.partition(":")[0] in ("", jax.default_backend())
        if is_here and all(value in found for value in node.values) and _is_exact(node):
            found.update(dict.fromkeys(node.outputs))
            nodes.append(node)
    return nodes


def _is_exact(node: Node) -> bool:
    """Whether a node takes and gives small arrays, with the same result on every device."""
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
    """Return the scalars of the nodes that others use, as literals, computed by one program."""
    inside = {id(node) for node in nodes}
    made = {value for node in nodes for value in node.outputs if value.type.shape == ()}  # type: ignore[union-attr]
    used = {output for output in graph.outputs if output in made}
    for node in graph.nodes:
        if id(node) not in inside:
            used.update(value for value in node.values if value in made)
    wanted = [value for node in nodes for value in node.outputs if value in used]
    if not wanted:
        return {}
    # Literals are passed as arguments: XLA's constant folding of a division by zero ends the process on the CPU.
    literals = {id(o): o for node in nodes for o in node.inputs if isinstance(o, Literal)}
    inputs = {key: Value(f"literal_{index}", literal.type) for index, (key, literal) in enumerate(literals.items())}
    over = [replace(node, inputs=tuple(inputs.get(id(o), o) for o in node.inputs)) for node in nodes]
    fn = discharge(prune(Graph(tuple(inputs.values()), tuple(over), tuple(wanted)))).fn
    with jax.ensure_compile_time_eval():
        numbers = jax.device_get(jax_jit(fn)(*(literal.array for literal in literals.values())))
    return {value: _literal(number, value.type) for value, number in zip(wanted, numbers, strict=True)}


def _literal(number: Any, type: Any) -> Literal:
    return Literal(np.asarray(number)[()], type)


def _branch(node: Node) -> Graph | None:
    """Return the body that a branch runs, if its index is a literal."""
    if node.op is not ops.ctrl_cond or not isinstance(node.inputs[0], Literal):
        return None
    index = int(np.asarray(node.inputs[0].value))
    return node.bodies[min(max(index, 0), len(node.bodies) - 1)]


def _with_known(graph: Graph, known: dict[Value, Operand]) -> Graph:
    """Return the graph with known values replaced, and branches of known index replaced by the nodes of their body."""
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
