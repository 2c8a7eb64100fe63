"""Loops and branches with state in the eager mode, run op by op.

In this mode `jax.lax` runs loops and branches as Python, with two exceptions: inside `jax.checkpoint` and under
`jax.vmap` JAX traces them, and would compile them. Those with state are then called again by `jax.lax`, outside of the
trace, so that their traced bodies run op by op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.core import primitives as jax_primitives

from dflow.tracing.derivatives.discharge import still_live
from dflow.tracing.jax_frontend import inner_parts, jit_disabled, scan_counts, touches_state


def _scan(*operands: Any, jaxpr: Any, length: int, reverse: bool, **params: Any) -> list[Any]:
    consts_count, carry_count = scan_counts({"jaxpr": jaxpr, **params})
    consts, rest = operands[:consts_count], operands[consts_count:]
    body = jex.jaxpr_as_fun(jaxpr)

    def step(carry: Any, x: Any) -> Any:
        results = body(*consts, *carry, *x)
        return results[:carry_count], results[carry_count:]

    init, xs = list(rest[:carry_count]), list(rest[carry_count:])
    carry, ys = jax.lax.scan(step, init, xs, length=length, reverse=reverse)
    return [*carry, *ys]


def _cond(index: Any, *operands: Any, branches: Any, **_: Any) -> list[Any]:
    return list(jax.lax.switch(index, [jex.jaxpr_as_fun(branch) for branch in branches], *operands))


def _while(
    *operands: Any, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int, **_: Any
) -> list[Any]:
    end = cond_nconsts + body_nconsts
    cond_consts, body_consts, init = operands[:cond_nconsts], operands[cond_nconsts:end], operands[end:]
    test, body = jex.jaxpr_as_fun(cond_jaxpr), jex.jaxpr_as_fun(body_jaxpr)

    def live(carry: Any) -> Any:
        return test(*cond_consts, *carry)[0]

    def step(carry: Any) -> Any:
        return still_live(cond_jaxpr, lambda: live(carry), body(*body_consts, *carry), carry)

    return list(jax.lax.while_loop(lambda carry: live(carry).any(), step, list(init)))


def _run_eagerly(primitive: Any, rule: Callable[..., list[Any]]) -> None:
    """Make a control-flow primitive with state run by `rule` under `jax.disable_jit`."""
    compiled = primitive.impl

    def run(*operands: Any, **params: Any) -> Any:
        if jit_disabled() and any(touches_state(body.effects) for body, _ in inner_parts(params)):
            return rule(*operands, **params)
        return compiled(*operands, **params)

    primitive.def_impl(run)


_run_eagerly(jax_primitives.scan_p, _scan)
_run_eagerly(jax_primitives.cond_p, _cond)
_run_eagerly(jax_primitives.while_p, _while)
