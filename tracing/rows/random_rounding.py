"""Rounding of float32 numbers to bfloat16 up or down at random, so that the mean is the number itself.

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
from dflow.tracing.rows.slices import ArrayPart

_WORD = 2**32


def rounded_at_random(value: Any, seed: Any, part: ArrayPart | None = None) -> jax.Array:
    """The value, f32[...], in bfloat16: each number is one of its two neighbours there, and itself if it is exact.

    seed  u32[]; another seed gives other bits
    part  the part of an array that the value is, or None for the whole
    """
    whole = value.shape if part is None else part.whole
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    origin = 0
    if part is not None:
        along = part.indices
        origin, strides[along.axis] = along.start * strides[along.axis], along.step * strides[along.axis]
    rows = jnp.arange(value.shape[0]) if value.ndim else jnp.int32(0)
    result: jax.Array = round_at_random_p.bind(
        value, rows, seed, new_dtype=jnp.dtype(jnp.bfloat16), origin=origin, strides=tuple(strides)
    )
    return result


def _rounded(value: Any, rows: Any, seed: Any, *, new_dtype: Any, origin: int, strides: tuple[int, ...]) -> Any:
    position = jnp.full(value.shape, np.uint32(origin % _WORD))
    for axis, stride in enumerate(strides):
        along = jnp.arange(value.shape[axis]) if axis else rows
        along = along.astype(jnp.uint32) * np.uint32(stride % _WORD)
        position += along.reshape(-1, *[1] * (value.ndim - axis - 1))
    noise = mixed_bits(mixed_bits(position) ^ seed) >> 16
    bits = (jax.lax.bitcast_convert_type(value, jnp.uint32) + noise) & np.uint32(0xFFFF0000)
    rounded = jnp.where(jnp.isfinite(value), jax.lax.bitcast_convert_type(bits, jnp.float32), value)
    return rounded.astype(new_dtype)


def _batched(args: Any, dims: Any, **params: Any) -> tuple[Any, int]:
    return jax.vmap(partial(_rounded, **params), in_axes=tuple(dims))(*args), 0


round_at_random_p: Any = jex.Primitive("round_at_random")
round_at_random_p.def_impl(jax.jit(_rounded, static_argnames=("new_dtype", "origin", "strides")))
round_at_random_p.def_abstract_eval(
    lambda value, rows, seed, *, new_dtype, origin, strides: value.update(dtype=new_dtype)
)
ad.defjvp(round_at_random_p, lambda tangent, *_, new_dtype, **__: tangent.astype(new_dtype), None, None)
batching.primitive_batchers[round_at_random_p] = _batched
mlir.register_lowering(round_at_random_p, mlir.lower_fun(_rounded, multiple_results=False))
