"""Convert the body of an XLA call to a pure function, which takes and returns the values of variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow.lowering.programs.prefetch import prefetched
from dflow.tracing.errors import InternalError
from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Node, Operand, Value
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.row_marks import marked
from dflow.tracing.ir.types import ArrayType, RefType, array_type_of
from dflow.tracing.ir.updates import looked_up, updated
from dflow.tracing.ir.wire_codecs import decoded, encoded
from dflow.tracing.jaxprs.attributes import bind_node


@dataclass(frozen=True)
class Discharged:
    """`fn(*written, *read, *operands)` returns the new values of `written`, then the results. It evaluates `graph`."""

    fn: Callable[..., list[Any]]
    types: tuple[ArrayType, ...]
    written: tuple[Value, ...]
    read: tuple[Value, ...]
    operands: tuple[Value, ...]
    graph: Graph


def discharge(body: Graph) -> Discharged:
    """Return the pure function of a graph of JAX's ops, variable ops and codecs."""
    effects = [(effect, ref) for node in body.nodes for effect, ref in node.effects if ref is not None]
    changed = {ref for effect, ref in effects if effect is Effect.WRITE}
    written = tuple(ref for ref in body.refs if ref in changed)
    read = tuple(ref for ref in body.refs if ref not in changed)
    operands = tuple(value for value in body.inputs if not isinstance(value.type, RefType))

    def fn(*args: Any) -> list[Any]:
        env = dict(zip((*written, *read, *operands), args, strict=True))
        for node in body.nodes:
            _step(node, env)
        return [env[ref] for ref in written] + [_value(output, env) for output in body.outputs]

    types = tuple(_held(value) for value in (*written, *read, *operands))
    return Discharged(fn, types, written, read, operands, body)


def _held(value: Value) -> ArrayType:
    if isinstance(value.type, RefType):
        return value.type.of
    assert isinstance(value.type, ArrayType)
    return value.type


def _value(operand: Operand, env: Mapping[Value, Any]) -> Any:
    if isinstance(operand, Value):
        return env[operand]
    if array_type_of(operand.value).dtype == operand.type.dtype:
        return operand.value
    # JAX would give a Python number its default dtype; the literal may have another.
    return np.asarray(operand.value).astype(operand.type.dtype)[()]


def _step(node: Node, env: dict[Value, Any]) -> None:
    values = [_value(operand, env) for operand in node.inputs]
    if node.op.primitive is not None:
        env.update(zip(node.outputs, bind_node(node, values), strict=False))
    elif node.op in _KINDS:
        ref = node.inputs[0]
        assert isinstance(ref, Value)
        env[ref] = updated(_KINDS[node.op], *values)
    elif node.op is ops.var_mark:
        ref = node.inputs[0]
        assert isinstance(ref, Value)
        env[ref] = marked(values[0], *values[2:])
    elif node.op in _RULES:
        env[node.outputs[0]] = _RULES[node.op](node.attributes, *values)
    else:
        raise InternalError(f"{node.op.name} cannot run inside an XLA call")


#: The kind of update of each op that writes a variable.
_KINDS: Mapping[OpDef, str] = {op: kind for kind, op in ops.UPDATES.items()}

#: The result of each other op, of its attributes and the values of its operands.
_RULES: Mapping[OpDef, Callable[..., Any]] = {
    ops.var_read: lambda _, value: value,
    ops.var_gather: lambda _, table, indices: looked_up(table, prefetched(table, indices)),
    ops.net_encode: lambda attributes, value: encoded(attributes["codec"], value),
    ops.net_decode: lambda attributes, value: decoded(attributes["codec"], value, attributes["type"]),
}
