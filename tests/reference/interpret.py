"""What a graph means: run it node by node on concrete values, state included.

Every other way to run a graph is tested against this one, so it is simple, slow, and shares nothing with them: no
discharge, no compiled region, loops and branches turned by Python. Graphs that were cut apart run side by side, each
node when its operands, its order edges and the value it receives are there.

A node with an effect runs in program order with those on the same variable that it does not commute with. Given a
`choose`, program order counts for nothing, and only order edges hold effects apart: that is what an executor keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import DflowError, InputError, InternalError
from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect, commute
from dflow.tracing.ir.graph import Graph, Node, Operand, Value
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.types import HANDLES
from dflow.tracing.ir.wire_codecs import LARGEST, float_limits
from dflow.tracing.jax_frontend import scan_counts
from dflow.tracing.jaxprs.attributes import Body, bind_node, body_of
from dflow.tracing.source import at
from tests.reference.accumulator_model import AccumulatorModel
from tests.reference.queue_model import QueueModel

#: A queue or an accumulator with one user at a time.
HostModel = QueueModel | AccumulatorModel

#: The values of variables, and a `HostModel` for each queue and accumulator, by the names of the inputs for them.
StateByName = dict[str, Any]

#: Given the nodes that can run now, which runs.
Choose = Callable[[Sequence[Node]], Node]


def interpret(
    graph: Graph, inputs: Sequence[Any], state: Mapping[str, Any], choose: Choose | None = None
) -> tuple[list[Any], StateByName]:
    """Run `graph`: its outputs, and the state after it.

    inputs  a value for each input of the graph that is not a variable, in order
    state   a value for each variable of the graph, and a HostModel for each queue and accumulator; it is not changed
    raises  DflowError when a node cannot run: it holds an `Opaque`, receives a value that no node sends, or would have
            to wait for another program
    """
    outputs, after = interpret_parts([(graph, inputs)], state, choose)
    return outputs[0], after


def interpret_parts(
    parts: Sequence[tuple[Graph, Sequence[Any]]], state: Mapping[str, Any], choose: Choose | None = None
) -> tuple[list[list[Any]], StateByName]:
    """Run graphs that share a state and send to each other, each on its inputs: the outputs of each, and the state."""
    after = {name: value.copy() if isinstance(value, HostModel) else value for name, value in state.items()}
    edges = _Edges()
    runs = [_Run(graph, inputs, after, edges, choose) for graph, inputs in parts]
    while any(run.waiting for run in runs):
        if not any(run.advance() for run in runs):
            stuck = [node for run in runs for node in run.waiting]
            raise DflowError(_stuck(stuck, edges))
    return [run.outputs() for run in runs], after


class _Edges(dict[str, list[Any]]):
    """What was sent and not yet received, by edge: its value, once for each task that it was sent to."""

    def send(self, edge: str, value: Any) -> None:
        self.setdefault(edge, []).append(value)

    def receive(self, edge: str) -> Any:
        value, *rest = self.pop(edge)
        if rest:
            self[edge] = rest
        return value


def _stuck(nodes: Sequence[Node], edges: Mapping[str, Any]) -> str:
    waits = [f"%{node.outputs[0].name} for edge {node.attributes['edge']!r}" for node in nodes if _receives(node)]
    first = nodes[0]
    return (
        f"the graph stops with {len(nodes)} nodes to run, the first %{first.outputs[0].name} ({first.op.name})"
        f"{at(first.loc)}\n  waiting: {', '.join(waits) or 'none'}; sent and not received: {sorted(edges) or 'none'}"
    )


def _receives(node: Node) -> bool:
    return node.op is ops.net_recv


class _Run:
    """A graph that runs: the values computed until now, and the pending nodes."""

    def __init__(
        self, graph: Graph, inputs: Sequence[Any], state: StateByName, edges: _Edges, choose: Choose | None
    ) -> None:
        self.waiting = list(graph.nodes)
        self._graph = graph
        self._state = state
        self._edges = edges
        self._choose = choose
        arrays = [value for value in graph.inputs if not isinstance(value.type, HANDLES)]
        if len(arrays) != len(inputs):
            raise DflowError(f"the graph takes {len(arrays)} inputs beside variables, and was given {len(inputs)}")
        self._env: dict[Value, Any] = dict(zip(arrays, inputs, strict=True))
        self._names = {ref: ref.name for ref in graph.refs}
        if missing := sorted({*self._names.values()} - {*state}):
            raise DflowError(f"the state has no value for {', '.join(missing)}; it has {sorted(state) or 'none'}")

    def advance(self) -> bool:
        node = self._next()
        if node is None:
            return False
        self.waiting.remove(node)
        results = self._apply(node)
        if not node.array_outputs:
            results = [None]
        self._env.update(zip(node.outputs, results, strict=True))
        return True

    def _next(self) -> Node | None:
        ready = (node for index, node in enumerate(self.waiting) if self._can_run(index, node))
        if self._choose is None:
            return next(ready, None)
        nodes = list(ready)
        return self._choose(nodes) if nodes else None

    def outputs(self) -> list[Any]:
        return [self._value(output) for output in self._graph.outputs]

    def _can_run(self, index: int, node: Node) -> bool:
        needed = (value for value in (*node.values, *node.after) if not isinstance(value.type, HANDLES))
        if any(value not in self._env for value in needed):
            return False
        if _receives(node) and node.attributes["edge"] not in self._edges:
            return False
        return self._choose is not None or not any(_in_order(before, node) for before in self.waiting[:index])

    def _value(self, operand: Operand) -> Any:
        return self._env[operand] if isinstance(operand, Value) else jnp.asarray(operand.value, operand.type.dtype)

    def _apply(self, node: Node) -> list[Any]:
        if node.op.primitive is not None:
            return numeric_results(node, [self._value(operand) for operand in node.inputs])
        if node.bodies:
            return self._run_bodies(node)
        if node.op is ops.net_send:
            values = [self._value(value) for value in node.inputs]
            if "fill" in node.attributes:
                values[0] = np.array(values[0])
                values[0][int(values[1]) :] = node.attributes["fill"]
            self._edges.send(node.attributes["edge"], values)
            return []
        if node.op is ops.dev_copy:
            return [self._value(node.inputs[0])]
        if node.op is ops.ids_check:
            ids, *values = map(self._value, node.inputs)
            return [_checked(ids, node.attributes["size"]), *values]
        if node.op is ops.net_encode:
            return [_rounded(node.attributes["codec"], np.asarray(self._value(node.inputs[0])))]
        if node.op is ops.net_decode:
            # `_rounded` has rounded the value and kept its dtype.
            return [self._value(node.inputs[0])]
        if _receives(node):
            return list(self._edges.receive(node.attributes["edge"]))
        return self._touch(node)

    def _touch(self, node: Node) -> list[Any]:
        ref, *operands = node.inputs
        if node.op is ops.var_mark:
            name, values = ref_name(ref), [self._value(operand) for operand in operands[1:]]
            self._state[name] = _marked(self._state[name], *values)
            return []
        name, values = ref_name(ref), [self._value(operand) for operand in operands]
        if node.op.is_on_resource:
            return _used(node, self._state[name], values)
        if node.op is ops.var_read:
            return [self._state[name]]
        if node.op is ops.var_gather:
            return [_rows_at(self._state[name], *values)]
        if node.op in _ASSIGNED:
            self._state[name] = _ASSIGNED[node.op](self._state[name], *values)
        elif node.op in _ROW_BY_ROW:
            self._state[name] = _written_row_by_row(_ROW_BY_ROW[node.op], self._state[name], *values)
        else:
            raise InternalError(f"the interpreter has no rule for {node.op.name}; please report this")
        return []

    def _run_bodies(self, node: Node) -> list[Any]:
        """Run the body of a call, the branch taken, or a loop iteration by iteration."""
        own = [self._value(operand) for operand in node.inputs[: node.op.own_operands]]
        arrays = [self._value(operand) for operand in node.handed if not isinstance(operand.type, HANDLES)]

        def run(number: int, operands: Sequence[Any]) -> list[Any]:
            return self._run_body(node, node.bodies[number], operands)

        if node.op is ops.xla_call:
            return run(0, arrays)
        if node.op is ops.ctrl_cond:
            return run(min(max(int(own[0]), 0), len(node.bodies) - 1), arrays)
        carry = node.attributes["carry"]
        if node.op is ops.ctrl_while:
            kept, carried = arrays[: len(arrays) - carry], arrays[len(arrays) - carry :]
            while bool(run(0, [*kept, *carried])[0]):
                carried = run(1, [*kept, *carried])
            return carried
        start = len(arrays) - node.attributes["rows"]
        kept, carried, xs = arrays[: start - carry], arrays[start - carry : start], arrays[start:]
        return _scanned(node, lambda values, row: run(0, [*kept, *values, *row]), carried, xs)

    def _run_body(self, node: Node, body: Graph, operands: Sequence[Any]) -> list[Any]:
        outer = dict(zip(body.inputs, node.handed, strict=True))
        names = {ref.name: ref_name(outer[ref]) for ref in body.refs}
        results, after = interpret(body, operands, {name: self._state[outside] for name, outside in names.items()})
        self._state.update({names[name]: value for name, value in after.items()})
        return results


def _marked(marks: Any, *indices: Any) -> Any:
    """The marks of rows after a change; the last but one is the present period and the last is no row's."""
    held = np.array(marks)
    rows = range(len(held) - 2)
    for index in np.asarray(indices[0]).reshape(-1).tolist() if indices else rows:
        place = index + len(rows) if index < 0 else index
        if place in rows:
            held[place] = held[-2]
    return jnp.asarray(held)


def _used(node: Node, model: HostModel, operands: Sequence[Any]) -> list[Any]:
    try:
        return model.use(node, operands)
    except DflowError as error:
        raise type(error)(f"node %{node.outputs[0].name} ({node.op.name}): {error}{at(node.loc)}") from None


#: From the old value and the operand to the new value; of an update of rows, from the old row and one row.
_ASSIGNED: Mapping[OpDef, Callable[[Any, Any], Any]] = {
    ops.UPDATES["assign"]: lambda old, new: new,
    ops.UPDATES["assign_add"]: lambda old, new: old + new,
    ops.UPDATES["assign_add_rounded"]: lambda old, delta: jnp.asarray(old + delta, old.dtype),
    ops.UPDATES["assign_sub"]: lambda old, new: old - new,
    ops.UPDATES["assign_mul"]: lambda old, new: old * new,
    ops.UPDATES["assign_max"]: jnp.maximum,
    ops.UPDATES["assign_min"]: jnp.minimum,
}
_ROW_BY_ROW: Mapping[OpDef, Callable[[Any, Any], Any]] = {
    ops.UPDATES["scatter_update"]: lambda old, new: new,
    ops.UPDATES["scatter_add"]: lambda old, new: old + new,
    ops.UPDATES["scatter_sub"]: lambda old, new: old - new,
    ops.UPDATES["scatter_mul"]: lambda old, new: old * new,
    ops.UPDATES["scatter_max"]: jnp.maximum,
    ops.UPDATES["scatter_min"]: jnp.minimum,
}


def _rows_at(value: Any, indices: Any) -> Any:
    """The rows at `indices`: a negative index counts from the end, one past an end gives the row at that end."""
    count, flat = len(value), np.asarray(indices).reshape(-1).tolist()
    places = [min(max(index + count if index < 0 else index, 0), count - 1) for index in flat]
    rows = [value[place] for place in places] or [jnp.zeros_like(value[0])]
    shape = (*np.shape(indices), *value.shape[1:])
    return jnp.stack(rows)[: len(places)].reshape(shape)


def _written_row_by_row(new_row: Callable[[Any, Any], Any], value: Any, indices: Any, rows: Any) -> Any:
    """Each row after the one before it; a row that does not exist is not written."""
    value = jnp.asarray(value)
    flat = np.asarray(indices).reshape(-1).tolist()
    for index, row in zip(flat, jnp.reshape(rows, (len(flat), *value.shape[1:])), strict=True):
        place = index + len(value) if index < 0 else index
        if 0 <= place < len(value):
            value = value.at[place].set(new_row(value[place], row))
    return value


def _rounded(codec: str, value: Any) -> Any:
    """What is left of an array on its way, element by element in NumPy."""
    if codec == "bfloat16":
        return jnp.asarray(value.astype(jnp.bfloat16).astype(value.dtype))
    wide = value.astype(np.float64 if value.dtype.itemsize > 4 else np.float32)
    finite = wide[np.isfinite(wide)]
    scale = wide.dtype.type(max(np.abs(finite).max(initial=0) / LARGEST[codec], np.finfo(wide.dtype).tiny))
    with np.errstate(all="ignore"):
        shares = np.where(np.isfinite(wide), np.clip(wide / scale, -LARGEST[codec], LARGEST[codec]), wide)
        if codec == "int8":
            small = np.where(np.isfinite(shares), np.round(shares), np.nan)
        else:
            small = shares.astype(codec).astype(wide.dtype)
        most = float(float_limits(value.dtype).max)
        left = np.where(np.isfinite(small), np.clip(small * scale, -most, most), small)
        return jnp.asarray(left.astype(value.dtype))


def _checked(ids: Any, size: int) -> Any:
    if any(not 0 <= number < size for number in np.asarray(ids).reshape(-1).tolist()):
        raise InputError(f"ids: expected numbers from 0 to {size - 1}, got {ids}")
    return ids


def ref_name(operand: Operand) -> str:
    """The name of the variable that an operand stands for. Raises InternalError for one that is no variable."""
    if not isinstance(operand, Value) or not isinstance(operand.type, HANDLES):
        raise InternalError(f"{operand!r} stands where a variable should; please report this")
    return operand.name


def _in_order(before: Node, node: Node) -> bool:
    """Whether `node` has an effect that must come after one of `before`'s."""
    return any(
        Effect.UNKNOWN in (one, other) or (where is not None and where is elsewhere and not commute(one, other))
        for one, where in before.effects
        for other, elsewhere in node.effects
    )


def numeric_results(node: Node, operands: list[Any]) -> list[Any]:
    """The results of a numeric node: loops, branches and calls by running their bodies, all else by JAX."""
    rule = _CONTROL.get(node.op.name)
    return rule(node, operands) if rule is not None else bind_node(node, operands)


def _run_body(body: Any, operands: Sequence[Any]) -> list[Any]:
    body = body if isinstance(body, Body) else body_of(body)
    if not isinstance(body, Body):
        raise DflowError(f"a body is {body}, which cannot be run node by node")
    return interpret(body.graph, [*body.constants, *operands], {})[0]


def _call(key: str) -> Callable[[Node, list[Any]], list[Any]]:
    return lambda node, operands: _run_body(node.attributes[key], operands)


def _scan(node: Node, operands: list[Any]) -> list[Any]:
    attributes = node.attributes
    num_consts, num_carry = scan_counts(attributes)
    consts, rest = operands[:num_consts], operands[num_consts:]

    def turn(carry: Sequence[Any], row: Sequence[Any]) -> list[Any]:
        return _run_body(attributes["jaxpr"], [*consts, *carry, *row])

    return _scanned(node, turn, rest[:num_carry], rest[num_carry:])


def _scanned(
    node: Node,
    run: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    carry: Sequence[Any],
    xs: Sequence[Any],
) -> list[Any]:
    count, attributes = len(carry), node.attributes
    types: list[Any] = [value.type for value in node.array_outputs[count:]]
    stacked: list[list[Any]] = [[] for _ in types]
    turns = range(attributes["length"])
    for turn in reversed(turns) if attributes["reverse"] else turns:
        results = run(carry, [x[turn] for x in xs])
        carry = results[:count]
        for values, result in zip(stacked, results[count:], strict=True):
            values.append(result)
    ordered = [values[::-1] if attributes["reverse"] else values for values in stacked]
    ys = [
        jnp.stack(values) if values else jnp.zeros(t.shape, t.dtype) for values, t in zip(ordered, types, strict=True)
    ]
    return [*carry, *ys]


def _while(node: Node, operands: list[Any]) -> list[Any]:
    attributes = node.attributes
    test_end = attributes["cond_nconsts"]
    body_end = test_end + attributes["body_nconsts"]
    test, consts, carry = operands[:test_end], operands[test_end:body_end], operands[body_end:]
    # Under vmap each element has its own condition, and iterates as long as that holds.
    while (live := np.asarray(_run_body(attributes["cond_jaxpr"], [*test, *carry])[0])).any():
        after = _run_body(attributes["body_jaxpr"], [*consts, *carry])
        of_each = [live.reshape(live.shape + (1,) * (np.ndim(old) - live.ndim)) for old in carry]
        carry = [jnp.where(turns, new, old) for turns, new, old in zip(of_each, after, carry, strict=True)]
    return carry


def _cond(node: Node, operands: list[Any]) -> list[Any]:
    index, *rest = operands
    branches = node.attributes["branches"]
    return _run_body(branches[min(max(int(index), 0), len(branches) - 1)], rest)


_CONTROL: Mapping[str, Callable[[Node, list[Any]], list[Any]]] = {
    "jax.scan": _scan,
    "jax.while": _while,
    "jax.cond": _cond,
    "jax.jit": _call("jaxpr"),
    "jax.pjit": _call("jaxpr"),
    "jax.closed_call": _call("call_jaxpr"),
    "jax.custom_jvp_call": _call("call_jaxpr"),
    "jax.custom_vjp_call": _call("call_jaxpr"),
    "jax.remat2": _call("jaxpr"),
    "jax.checkpoint": _call("jaxpr"),
}
