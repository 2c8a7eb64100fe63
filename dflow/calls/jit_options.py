"""Options of `jax.jit` for functions with state: shardings become constraints, and what only JAX can run is refused.

JAX applies `in_shardings` and `out_shardings` to a whole program. Here they become constraints on each array, because a
graph may be split into several programs, whose inputs also include the variables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import jit as jax_jit
from jax.sharding import NamedSharding

from dflow.calls.static_arguments import StaticArguments, static_arguments
from dflow.tracing.errors import DeviceError, DflowError
from dflow.tracing.ir.explicit_sharding import explicit_sharding, with_sharding
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import strange_types

_VALUES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def takes_constants(options: Mapping[str, Any], jaxpr: Any, consts: Sequence[Any]) -> bool:
    """Whether closed-over arrays may become inputs without a visible difference.

    An input has a device and a constant has none; and only JAX handles `jax.Ref`s and the options `backend` and
    `device`.
    """
    placed = any(getattr(const, "committed", False) for const in consts) and jax.device_count() > 1
    return not (placed or _given(options) or strange_types(jaxpr))


def refuse_state(name: str, options: Mapping[str, Any], jaxpr: Any) -> None:
    """Raise DflowError if the function `name`, which has state, uses a feature that only JAX can run."""
    if given := _given(options):
        raise DflowError(
            f"{name} has state, and takes no {' and no '.join(given)}",
            "leave that out: jax.default_device holds for every call within",
        )
    if types := strange_types(jaxpr):
        raise DflowError(
            f"{name} has state, and takes, gives or closes over {types[0]}, which is no array",
            "pass the array it holds (of a jax.Ref, ref[...]), or keep that in a dflow.Variable",
        )


def _given(options: Mapping[str, Any]) -> list[str]:
    """Return which of the options `backend` and `device` are set to something else than the default backend."""
    given = {name: options.get(name) for name in ("backend", "device")}
    return [name for name, value in given.items() if value not in (None, jax.default_backend())]


def refuse_types_alone(fn: Callable[..., Any], options: Mapping[str, Any], args: Any, kwargs: Any, leaves: Any) -> None:
    """Have JAX raise its own error for arguments that have a type but no value, such as a ShapeDtypeStruct."""
    if not all(isinstance(leaf, _VALUES) for leaf in leaves):
        static = {name: given for name, given in options.items() if name.startswith("static")}
        jax_jit(functools.wraps(fn)(lambda *args, **kwargs: 0), keep_unused=True, **static)(*args, **kwargs)


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
    by_position = dict(zip(traced, held, strict=True))
    return tuple(by_position.get(index, arg) for index, arg in enumerate(args))


def _held(tree: Any, shardings: Any, typed: Callable[[Any, NamedSharding], Any]) -> Any:
    """Return the tree with each array constrained to the sharding at its position in a prefix of the tree; None is any.

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
