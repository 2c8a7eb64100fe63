"""A while loop that can be differentiated backwards, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.derivatives.discharge import refuse_writes
from dflow.tracing.errors import GraphTypeError
from dflow.tracing.jax_frontend import accesses, make_jaxpr
from dflow.tracing.source import caller

#: JAX's error for a loop whose number of iterations is unknown, and the remedy.
NOT_REVERSED = "Reverse-mode differentiation does not work for lax.while_loop"
REVERSED = (
    "  write dflow.while_loop(cond, body, init, max_iters=...), which has a gradient, or loop by jax.lax.scan or a\n"
    "  fori_loop between numbers that are known when it is traced"
)


def while_loop(cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any, *, max_iters: int) -> Any:
    """`jax.lax.while_loop` with a largest number of iterations, so that `grad` and `vjp` can differentiate it.

    cond       from the carry to a boolean scalar; it may read variables
    body       from the carry to the next one, of the same structure and types; it may read and write variables
    max_iters  largest number of iterations. A loop that has not ended by then stops with the carry of iteration
               `max_iters`: test `cond(result)` where that matters
    returns    the carry when `cond` first is false

    The backward pass keeps about `2 * sqrt(max_iters)` carries and runs each iteration once more. The forward pass
    stops when `cond` is false, after at most `sqrt(max_iters)` empty iterations of an outer loop and as many of an
    inner one. Under `vmap` every element runs as many iterations as the longest; extra ones do not change its carry.

    Raises GraphTypeError for a `max_iters` that is no positive integer, DflowError when `cond` writes variables.
    """
    if type(max_iters) is not int or max_iters < 1:
        raise GraphTypeError(f"while_loop was given max_iters={max_iters!r}, not a positive integer", at=caller())
    refuse_writes(accesses(make_jaxpr(cond, init)[0].effects)[1])
    inner = math.isqrt(max_iters - 1) + 1
    outer = -(-max_iters // inner)

    def is_live(state: tuple[Any, Any]) -> Any:
        turns, carry = state
        return jnp.logical_and(turns < max_iters, cond(carry))

    def turn(state: tuple[Any, Any]) -> tuple[Any, Any]:
        turns, carry = state
        return turns + 1, body(carry)

    step = _while_live(is_live, turn, inner)
    segment = _while_live(is_live, jax.checkpoint(step), outer)
    _, result = segment((jnp.int32(0), jax.tree_util.tree_map(jnp.asarray, init)))
    return result


def _while_live(is_live: Callable[[Any], Any], step: Callable[[Any], Any], length: int) -> Callable[[Any], Any]:
    """`step` up to `length` times, as long as it is live before each."""

    def one(state: Any, _: None) -> tuple[Any, None]:
        return jax.lax.cond(is_live(state), step, lambda same: same, state), None

    return lambda state: jax.lax.scan(one, state, None, length=length)[0]
