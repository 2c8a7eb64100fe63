"""Codecs that make a value smaller for the transfer between tasks: encoding and decoding of arrays.

`bfloat16` is a conversion. Those of one byte an element, `float8_e4m3fn`, `float8_e5m2` and `int8`, divide by a scale
first, so that the largest element fits. There is one scale for the whole array; its bytes are sent last. Elements that
are not finite do not count for the scale, and arrive as NaN, or unchanged where the format has them.

Integers, booleans, complex numbers, and arrays that a codec would not make smaller are sent unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.ir.types import ArrayType

#: The largest element that fits, by the codec with a scale.
LARGEST: Mapping[str, float] = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
#: Every codec, by its name.
CODECS = ("none", "bfloat16", *LARGEST)

_NOT_FINITE = -128

#: The largest and the smallest number of a floating dtype, and what else it cannot do; JAX's own has no type.
float_limits: Any = jnp.finfo


def encoded_type(codec: str, type: ArrayType) -> ArrayType | None:
    """The type of the encoded array; None if the codec does not change arrays of this type."""
    if codec == "none" or not jnp.issubdtype(type.dtype, np.floating):
        return None
    if codec == "bfloat16":
        made = ArrayType(np.dtype(jnp.bfloat16), type.shape)
    else:
        made = ArrayType(np.dtype("uint8"), (math.prod(type.shape) + scale_dtype(type).itemsize,))
    return made if made.size_bytes < type.size_bytes else None


def scale_dtype(type: ArrayType) -> np.dtype[Any]:
    """The dtype of the scale of an array of this type."""
    return np.dtype("float64" if type.dtype.itemsize > 4 else "float32")


def encoded(codec: str, value: jax.Array) -> jax.Array:
    """The encoded form of `value`, of the type given by `encoded_type`."""
    if codec == "bfloat16":
        return value.astype(jnp.bfloat16)
    dtype = scale_dtype(ArrayType(value.dtype, value.shape))
    wide = value.astype(dtype)
    is_finite = jnp.isfinite(wide)
    most = jnp.max(jnp.where(is_finite, jnp.abs(wide), 0), initial=0)
    scale = jnp.maximum(most / LARGEST[codec], float_limits(dtype).tiny)
    fitting = jnp.clip(wide / scale, -LARGEST[codec], LARGEST[codec])
    if codec == "int8":
        small = jnp.where(is_finite, jnp.round(fitting), _NOT_FINITE).astype(jnp.int8)
    else:
        # The conversion itself keeps what is not finite, as far as the format has it.
        small = jnp.where(is_finite, fitting, wide).astype(codec)
    parts = [jnp.ravel(jax.lax.bitcast_convert_type(part, jnp.uint8)) for part in (small, scale)]
    return jnp.concatenate(parts)


def decoded(codec: str, sent: jax.Array, type: ArrayType) -> jax.Array:
    """The array that `encoded` encoded, with this type; its values may have lost precision."""
    if codec == "bfloat16":
        return sent.astype(type.dtype)
    dtype, count = scale_dtype(type), math.prod(type.shape)
    scale = jax.lax.bitcast_convert_type(sent[count:], dtype)
    small = jax.lax.bitcast_convert_type(sent[:count], codec).astype(dtype)
    if codec == "int8":
        small = jnp.where(small == _NOT_FINITE, jnp.nan, small)
    most = float(float_limits(type.dtype).max)
    # The largest element times a rounded scale may be just past the largest there is.
    value = jnp.where(jnp.isfinite(small), jnp.clip(small * scale, -most, most), small)
    return jnp.reshape(value, type.shape).astype(type.dtype)
