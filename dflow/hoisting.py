"""A function with state within a transform of JAX's that runs at once, such as an outermost `jax.grad`.

There is no graph for the state to be part of: the variables are read, a pure function of their values is called, and
what it gives for them is written.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import jax
from jax import jit as jax_jit

from dflow.tracing.discharge import Border, State, evaluate
from dflow.tracing.jax_frontend import closed_parts, closed_tracers
from dflow.tracing.one_device import on_one_device

#: The pure function of each program, by which JAX knows what it has compiled for it. It must not keep its program.
_PURE: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()


def hoisted(looked: Any, leaves: Sequence[Any]) -> Any:
    """The result of what `jax.jit(fn).trace(...)` gave, on the leaves of its arguments."""
    closed = looked.jaxpr
    border = _border(closed)
    pure = _PURE.get(closed)
    if pure is None:
        pure = _PURE.setdefault(closed, _pure(weakref.ref(closed)))
    results, after = pure(on_one_device(border.values()), [*closed_tracers(looked), *leaves])
    border.write_back(after)
    return jax.tree_util.tree_unflatten(looked.out_tree, results)


def _border(closed: Any) -> Border:
    jaxpr, _ = closed_parts(closed)
    return Border(jaxpr.effects, lambda variable: True)


def _pure(program: weakref.ref[Any]) -> Any:
    @jax_jit
    def pure(values: list[Any], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        closed = program()  # whoever calls has it
        border, (jaxpr, consts) = _border(closed), closed_parts(closed)
        state = State(dict(zip(border.touched, values, strict=True)))
        return evaluate(jaxpr, consts, leaves, state), state.of(border.writes)

    return pure
