"""`in_shardings` and `out_shardings` of a function with state, as constraints on its arguments and results.

JAX applies these options to a whole program. Here they become constraints on each array, because a graph may be split
into several programs, whose inputs also include the variables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import jit as jax_jit
from jax.sharding import NamedSharding

from dflow.calls.static_arguments import StaticArguments, static_arguments
from dflow.tracing.errors import DeviceError
from dflow.tracing.ir.explicit_sharding import explicit_sharding, with_sharding
from dflow.tracing.ir.types import array_type_of


def constrained(fn: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return `jax.jit` of `fn` with the other `options`, and with constraints for the shardings."""
    others = {key: value for key, value in options.items() if key not in ("in_shardings", "out_shardings")}
    arriving, leaving = options.get("in_shardings"), options.get("out_shardings")

    @functools.wraps(fn)
    def within(*args: Any, **kwargs: Any) -> Any:
        return _held(fn(*_arrived(args, static, arriving), **kwargs), leaving, with_sharding)

    held = jax_jit(within, **others)
    static = static_arguments(held)
    return held


def _arrived(args: tuple[Any, ...], static: StaticArguments, shardings: Any) -> tuple[Any, ...]:
    """Return the arguments, the traced ones constrained to their shardings: one tree for all, or one for each."""
    traced = sorted(set(range(len(args))) - static.among(args))
    held = _held(tuple(args[index] for index in traced), shardings, _checked)
    by_place = dict(zip(traced, held, strict=True))
    return tuple(by_place.get(index, arg) for index, arg in enumerate(args))


def _held(tree: Any, shardings: Any, typed: Callable[[Any, NamedSharding], Any]) -> Any:
    """Return the tree with each array constrained to the sharding at its place in a prefix of the tree; None is any.

    `typed` converts a value whose type already has a sharding over explicit axes.
    """

    def hold_one(value: Any, sharding: Any) -> Any:
        wanted = explicit_sharding(sharding, value.shape)
        if wanted is None:
            return jax.lax.with_sharding_constraint(value, sharding)
        moved = value if array_type_of(value).sharding is None else typed(value, wanted)
        # A constraint need not name an explicit axis; then, as in JAX, the value's type has none either.
        return jax_jit(lambda held: held, in_shardings=sharding)(moved)

    def hold(sharding: Any, part: Any) -> Any:
        return part if sharding is None else jax.tree_util.tree_map(lambda value: hold_one(value, sharding), part)

    return jax.tree_util.tree_map(hold, shardings, tree, is_leaf=lambda sharding: sharding is None)


def _checked(value: Any, wanted: NamedSharding) -> Any:
    """Return an argument, or raise DeviceError for a type with another sharding: JAX would not move it."""
    given = array_type_of(value)
    if given.sharding != wanted:
        raise DeviceError(
            f"an argument is {given}, and its sharding does not match in_shardings, {wanted.spec}",
            "pass jax.device_put(value, sharding), or leave this argument's in_shardings None",
        )
    return value
