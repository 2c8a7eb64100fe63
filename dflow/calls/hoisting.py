"""Calls of a function with state inside a JAX transform that runs eagerly, such as an outermost `jax.grad`.

There is no enclosing trace that could hold the state. So the variables are read, a pure function of their values is
called, and its new values are written back.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import jax
from jax import jit as jax_jit

from dflow.tracing.derivatives.discharge import Border, State, evaluate
from dflow.tracing.derivatives.one_device import on_one_device
from dflow.tracing.jax_frontend import closed_parts, closed_tracers

#: The pure function of each program, so that JAX's cache finds what it compiled. It must not keep the program alive.
_PURE: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()


def hoisted(looked: Any, leaves: Sequence[Any]) -> Any:
    """Return the result of `looked`, a trace by `jax.jit(fn).trace(...)`, for the leaves of its arguments."""
    closed = looked.jaxpr
    border = _border(closed)
    pure = _PURE.get(closed)
    if pure is None:
        pure = _PURE.setdefault(closed, _pure(weakref.ref(closed)))
    results, after = pure(on_one_device([*map(border.value, border.touched)]), [*closed_tracers(looked), *leaves])
    border.write_back(after)
    return jax.tree_util.tree_unflatten(looked.out_tree, results)


def _border(closed: Any) -> Border:
    jaxpr, _ = closed_parts(closed)
    return Border(jaxpr.effects, lambda variable: True)


def _pure(program: weakref.ref[Any]) -> Any:
    @jax_jit
    def pure(values: list[Any], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        closed = program()  # alive: the caller holds it
        border, (jaxpr, consts) = _border(closed), closed_parts(closed)
        state = State(zip(border.touched, values, strict=True))
        return evaluate(jaxpr, consts, leaves, state), state.of(border.writes)

    return pure
