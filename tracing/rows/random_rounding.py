"""Rounding of float32 numbers to bfloat16 up or down at random, so that the mean is the number itself.

Or to 24 bits: the nearest bfloat16 number, and in an int8 how many 256ths of its last bit the number is further from 0.

The random bits are a hash of a seed and of the position of each number in the whole array. So they are the same however
the array is divided, and some rows can be rounded without the others.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from dflow.tracing.ir.id_hash import mixed_bits
from dflow.tracing.rows.row_values import LOW, NUMBER, WIDENED
from dflow.tracing.rows.slices import ArrayPart

_WORD = 2**32


def widened(high: Any, low: Any) -> jax.Array:
    """The float32 numbers of the two parts of numbers of 24 bits, bfloat16 and int8."""
    result: jax.Array = widened_p.bind(high, low)
    return result


def rounded_at_random(value: Any, seed: Any, part: ArrayPart | None = None, result: str = NUMBER) -> jax.Array:
    """The value, f32[...], in bfloat16: each number is one of its two neighbours there, and itself if it is exact.

    seed    u32[]; another seed gives other bits
    part    the part of an array that the value is, or None for the whole
    result  HIGH and LOW give the parts of numbers of 24 bits
    """
    whole = value.shape if part is None else part.whole
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    origin = 0
    if part is not None:
        along = part.indices
        origin, strides[along.axis] = along.start * strides[along.axis], along.step * strides[along.axis]
    rows = jnp.arange(value.shape[0]) if value.ndim else jnp.int32(0)
    dtype = jnp.dtype(jnp.int8 if result == LOW else jnp.bfloat16)
    rounded: jax.Array = round_at_random_p.bind(
        value, rows, seed, new_dtype=dtype, origin=origin, strides=tuple(strides), result=result
    )
    return rounded


def _widened(high: Any, low: Any) -> Any:
    bits = jax.lax.bitcast_convert_type(high.astype(jnp.float32), jnp.int32) + (low.astype(jnp.int32) << 8)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _rounded(
    value: Any, rows: Any, seed: Any, *, new_dtype: Any, origin: int, strides: tuple[int, ...], result: str
) -> Any:
    position = jnp.full(value.shape, np.uint32(origin % _WORD))
    for axis, stride in enumerate(strides):
        along = jnp.arange(value.shape[axis]) if axis else rows
        along = along.astype(jnp.uint32) * np.uint32(stride % _WORD)
        position += along.reshape(-1, *[1] * (value.ndim - axis - 1))
    dropped = 16 if result == NUMBER else 8
    noise = mixed_bits(mixed_bits(position) ^ seed) >> (32 - dropped)
    bits = (jax.lax.bitcast_convert_type(value, jnp.uint32) + noise) & np.uint32(_WORD - (1 << dropped))
    high = (bits + (0 if result == NUMBER else np.uint32(1 << 15))) & np.uint32(0xFFFF0000)
    if result == LOW:
        low = jax.lax.bitcast_convert_type(bits - high, jnp.int32) >> 8
        return jnp.where(jnp.isfinite(value), low, 0).astype(new_dtype)
    return jnp.where(jnp.isfinite(value), jax.lax.bitcast_convert_type(high, jnp.float32), value).astype(new_dtype)


def _batched(args: Any, dims: Any, **params: Any) -> tuple[Any, int]:
    return jax.vmap(partial(_rounded, **params), in_axes=tuple(dims))(*args), 0


round_at_random_p: Any = jex.Primitive("round_at_random")
round_at_random_p.def_impl(jax.jit(_rounded, static_argnames=("new_dtype", "origin", "strides", "result")))
round_at_random_p.def_abstract_eval(
    lambda value, rows, seed, *, new_dtype, **_: value.update(dtype=new_dtype, weak_type=False)
)
ad.defjvp(round_at_random_p, lambda tangent, *_, new_dtype, **__: tangent.astype(new_dtype), None, None)
batching.primitive_batchers[round_at_random_p] = _batched
mlir.register_lowering(round_at_random_p, mlir.lower_fun(_rounded, multiple_results=False))

widened_p: Any = jex.Primitive(WIDENED)
widened_p.def_impl(jax.jit(_widened))
widened_p.def_abstract_eval(lambda high, low: high.update(dtype=jnp.dtype(jnp.float32), weak_type=False))
ad.defjvp(widened_p, lambda tangent, *_: tangent.astype(jnp.float32), None)
batching.defbroadcasting(widened_p)
mlir.register_lowering(widened_p, mlir.lower_fun(_widened, multiple_results=False))

#: The rows of an array at positions replaced; those past the end are left out.
with_rows_p: Any = jex.Primitive("with_rows")


def _with_rows(whole: Any, positions: Any, rows: Any) -> Any:
    return whole.at[positions].set(rows, mode="drop")


with_rows_p.def_impl(jax.jit(_with_rows))
with_rows_p.def_abstract_eval(lambda whole, positions, rows: whole)
mlir.register_lowering(with_rows_p, mlir.lower_fun(_with_rows, multiple_results=False))
