"""The JAX primitive that records ops on queues and accumulators, and the class of primitives that refuse some traces.

One primitive records all of them: its parameter `op` is the op's declaration, whose typing rule is the primitive's,
and the other parameters are the op's attributes. Its rules raise an error where JAX would change the meaning of such an
op: repeat it along a batch, compile it without dflow, drop it because its operand is differentiated, or move it out of
a loop, as partial evaluation of a differentiated scan does with an op that is the same in each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import ad, mlir

from dflow.tracing.errors import PlainJitError
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jax_frontend import Access, Handle, ResourceEffect, line_bound
from dflow.tracing.source import at, caller

#: The traces that a refusal is asked about, by the name of their class in JAX: vmap's, and that of partial evaluation.
BATCHED, LOOPED = "BatchTrace", "JaxprTrace"


class WatchedPrimitive(jex.Primitive):
    """A primitive that can refuse traces of JAX, even if none of its operands is traced.

    Binding it in a BATCHED or LOOPED trace calls `refuse` with this name and the parameters; it raises to refuse.
    """

    def __init__(self, name: str, refuse: Callable[[str, Mapping[str, Any]], None]) -> None:
        super().__init__(name)
        self._refuse = refuse

    def bind_with_trace(self, trace: Any, *rest: Any) -> Any:
        kind = type(trace).__name__
        if kind in (BATCHED, LOOPED):
            self._refuse(kind, next(part for part in reversed(rest) if isinstance(part, dict)))
        return super().bind_with_trace(trace, *rest)  # type: ignore[no-untyped-call]


#: The harm that these traces would do to an op on a queue or an accumulator.
_FACTS = {
    BATCHED: "is used under vmap, which would share or repeat the op along the batch",
    LOOPED: "is used inside a loop that is differentiated, and JAX would move the op out of the loop",
}


def _refuse(trace: str, params: Mapping[str, Any]) -> None:
    resource = params["handle"].variable
    remedy = resource.batched_remedy if trace == BATCHED else resource.looped_remedy
    raise resource.error(f"{resource.title} {_FACTS[trace]}", remedy, at=line_bound())


host_p: Any = WatchedPrimitive("host_op", _refuse)
host_p.multiple_results = True


def _abstract(*operands: Any, handle: Handle, op: OpDef, **attributes: Any) -> Any:
    given = [ArrayType(aval.dtype, tuple(aval.shape)) for aval in operands]
    results = op.rule(handle.type, *given, **attributes)  # type: ignore[misc]
    avals = [jax.core.ShapedArray(type.shape, type.dtype) for type in results if isinstance(type, ArrayType)]
    return avals, {ResourceEffect(Access.HOST, handle)}


def _act_now(*operands: Any, handle: Handle, op: OpDef, **attributes: Any) -> Sequence[Any]:
    resource = handle.variable
    called = ResourceOp(op.name, line=at(caller()), **attributes)
    results: Sequence[Any] = resource.home.use_resource(resource, called, operands)
    return results


def _refuse_lost_value(primals: Any, tangents: Any, *, handle: Handle, op: OpDef, **_: Any) -> Any:
    resource = handle.variable
    raise resource.error(
        f"{resource.title} is given a value by {op.method} that depends on what jax.grad differentiates, and JAX "
        f"would drop that",
        f"use dflow.grad or dflow.value_and_grad instead of jax.grad, which {resource.puts} the value "
        "without its gradient; or write jax.lax.stop_gradient(value)",
        at=line_bound(),
    )


def _refuse_plain_jit(*_: Any, handle: Handle, **__: Any) -> Any:
    raise PlainJitError(
        f"{handle.variable.title} is used in a function that JAX compiles without dflow",
        "decorate the outermost function with @dflow.jit",
    )


host_p.def_effectful_abstract_eval(_abstract)
host_p.def_impl(_act_now)
ad.primitive_jvps[host_p] = _refuse_lost_value
mlir.register_lowering(host_p, _refuse_plain_jit)
