"""Arrays whose first rows alone count: between two tasks only those rows are sent.

The shapes of a compiled program are fixed, but the number of rows that a table's shard looks up is known only in the
step. So the array has room for the most rows that there can be, and the number beside it says how many are filled.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir


def first_rows(value: Any, count: Any, *, fill: int = 0) -> jax.Array:
    """The value with `fill` in all rows but the first `count`.

    value   [n, ...]
    count   i32[], from 0 to n
    """
    rows: jax.Array = first_rows_p.bind(value, jnp.asarray(count, jnp.int32), fill=fill)
    return rows


def _filled(value: Any, count: Any, *, fill: int) -> Any:
    is_first = jnp.arange(value.shape[0]) < count
    return jnp.where(is_first.reshape(-1, *[1] * (value.ndim - 1)), value, jnp.asarray(fill, value.dtype))


def _transpose(cotangent: Any, value: Any, count: Any, *, fill: int) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(value.aval), None]
    return [first_rows_p.bind(cotangent, count, fill=0), None]


def _batched(args: Any, dims: Any, *, fill: int) -> tuple[Any, int]:
    return jax.vmap(partial(_filled, fill=fill), in_axes=tuple(dims))(*args), 0


first_rows_p: Any = jex.Primitive("first_rows")
first_rows_p.def_impl(jax.jit(_filled, static_argnames="fill"))
first_rows_p.def_abstract_eval(lambda value, count, *, fill: value)
ad.defjvp(first_rows_p, lambda tangent, _, count, *, fill: first_rows_p.bind(tangent, count, fill=0), None)
ad.primitive_transposes[first_rows_p] = _transpose
batching.primitive_batchers[first_rows_p] = _batched
mlir.register_lowering(first_rows_p, mlir.lower_fun(_filled, multiple_results=False))
