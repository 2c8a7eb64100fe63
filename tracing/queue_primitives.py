"""The JAX primitive that records queue ops.

One primitive for all: its parameter `method` names the op of `ops.QUEUE_OPS`, whose typing rule is the primitive's, and
the other parameters are the op's attributes. What JAX may not do to a queue op is refused when it tries: to repeat it
along a batch, to compile it by itself, to drop it because what it puts in is differentiated, and to take it out of a
loop, as the partial evaluation of a differentiated scan does with what looks the same in each turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import ad, mlir

from dflow.tracing import ops
from dflow.tracing.errors import PlainJitError, QueueError
from dflow.tracing.jax_frontend import Handle, QueueEffect, line_bound
from dflow.tracing.source import at, caller
from dflow.tracing.types import ArrayType

#: JAX's traces that a queue op must not reach, and why.
_REFUSED_TRACES = {
    "BatchTrace": "is used under vmap, which would share or repeat the op along the batch\n"
    "  use enqueue_many or dequeue_many outside of the vmap",
    "JaxprTrace": "is used inside a loop that is differentiated, out of which JAX would take the op\n"
    "  dequeue before the loop, for instance with dequeue_many, or enqueue after it",
}


class _QueuePrimitive(jex.Primitive):
    """A primitive that sees every trace it is bound in, also when no operand is traced."""

    def bind_with_trace(self, trace: Any, *rest: Any) -> Any:
        refusal = _REFUSED_TRACES.get(type(trace).__name__)
        if refusal is not None:
            fact, remedy = refusal.split("\n")
            params = next(part for part in reversed(rest) if isinstance(part, dict))
            raise QueueError(f"queue {params['handle'].name!r} {fact}{at(line_bound() or caller())}\n{remedy}")
        return super().bind_with_trace(trace, *rest)  # type: ignore[no-untyped-call]


queue_p: Any = _QueuePrimitive("queue")
queue_p.multiple_results = True


def _abstract(*operands: Any, handle: Handle, method: str, **attributes: Any) -> Any:
    given = [ArrayType(aval.dtype, tuple(aval.shape)) for aval in operands]
    results = ops.QUEUE_OPS[method].rule(handle.type, *given, **attributes)  # type: ignore[misc]
    avals = [jax.core.ShapedArray(type.shape, type.dtype) for type in results if isinstance(type, ArrayType)]
    return avals, {QueueEffect(handle)}


def _act_now(*operands: Any, handle: Handle, method: str, **attributes: Any) -> Sequence[Any]:
    queue = handle.variable
    results: Sequence[Any] = queue.home.use_queue(queue, method, operands, attributes)
    return results


def _refuse_lost_enqueue(primals: Any, tangents: Any, *, handle: Handle, method: str, **_: Any) -> Any:
    raise QueueError(
        f"queue {handle.name!r} is given a value by {method} that depends on what jax.grad differentiates, and JAX "
        f"would drop that{at(line_bound())}\n"
        "  use dflow.grad or dflow.value_and_grad in the place of jax.grad, which enqueue the value without its "
        "gradient; or write jax.lax.stop_gradient(value)"
    )


def _refuse_plain_jit(*_: Any, handle: Handle, **__: Any) -> Any:
    raise PlainJitError(
        f"queue {handle.name!r} is used in a function that JAX compiles by itself{at(caller())}\n"
        "  decorate the outermost function with @dflow.jit"
    )


queue_p.def_effectful_abstract_eval(_abstract)
queue_p.def_impl(_act_now)
ad.primitive_jvps[queue_p] = _refuse_lost_enqueue
mlir.register_lowering(queue_p, _refuse_plain_jit)
