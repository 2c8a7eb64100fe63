"""Ids of 64 bits, each as two numbers of 32: JAX has no more bits unless `jax_enable_x64` is set."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import InputError
from dflow.tracing.ir.each_once import mixed_bits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WideIds:
    """Ids of 64 bits, of any shape. It is a pytree, so batches of them are sliced, stacked and passed as others.

    high  u32[...], the upper 32 bits
    low   u32[...], the lower 32 bits
    """

    high: Any
    low: Any


def wide_ids(ids: Any) -> WideIds:
    """Return ids as `WideIds`, for the arguments of functions of `dflow.jit`.

    ids     integers of any shape and of at most 64 bits, in NumPy's arrays or lists: each id as it is, a negative one
            as its 64 bits. Or strings or bytes: a hash of 64 bits of each, the same on every machine
    raises  InputError for a JAX array of fewer than 64 bits, which may have lost the upper ones, and for other values
    """
    if isinstance(ids, jax.Array):
        if ids.dtype.itemsize < 8 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise InputError(
                f"wide ids: expected NumPy integers or strings, got a JAX array of {ids.dtype}: JAX keeps 32 bits "
                f"of each number",
                "make them of the NumPy ids, before a function of dflow.jit gets them: step(dflow.wide_ids(ids))",
            )
        return WideIds((ids >> 32).astype(jnp.uint32), ids.astype(jnp.uint32))
    array = np.asarray(ids)
    if not array.size and array.dtype == np.float64:  # an empty list
        array = array.astype(np.int64)
    if array.dtype.kind in "US" or (array.dtype == object and all(isinstance(id, str | bytes) for id in array.flat)):
        hashed = [_hash(id) for id in array.flat]
        array = np.array(hashed, np.uint64).reshape(array.shape)
    if array.dtype == object and all(isinstance(id, int | np.integer) for id in array.flat):
        array = np.array([int(id) % 2**64 for id in array.flat], np.uint64).reshape(array.shape)
    if not np.issubdtype(array.dtype, np.integer):
        raise _no_ids(array)
    bits = array.astype(np.int64 if np.issubdtype(array.dtype, np.signedinteger) else np.uint64).view(np.uint64)
    return WideIds((bits >> np.uint64(32)).astype(np.uint32), bits.astype(np.uint32))


def _no_ids(array: np.ndarray[Any, Any]) -> InputError:
    """The error for an array that has other values than integers and strings: it names the first of them."""
    is_missing = array != array if array.dtype.kind in ("f", "O") else np.zeros(array.shape, bool)
    for place, id in np.ndenumerate(array):
        if id is None or bool(np.all(is_missing[place])):
            return InputError(
                f"wide ids: expected integers or strings, got {id} at {place}",
                "leave its row out, or give the missing an id of their own, such as column.fillna('') in pandas",
            )
        if array.dtype == object and not isinstance(id, str | bytes):
            return InputError(
                f"wide ids: expected strings, or integers alone, got {id!r}, a {type(id).__name__}, at {place}",
                "convert them first, for instance by column.astype(str)",
            )
    return InputError(f"wide ids: expected integers or strings, got {array.dtype}", "convert them first")


def _hash(id: Any) -> int:
    given = id.encode() if isinstance(id, str) else bytes(id)
    return int.from_bytes(hashlib.blake2b(given, digest_size=8).digest(), "little")


def mixed(high: Any, low: Any) -> jax.Array:
    """The hash MurmurHash3 of ids, u32[...] like their parts: each bit depends on all bits of the id."""
    value = jnp.zeros(jnp.shape(low), jnp.uint32)
    for part in (low, high):
        word = _rotated(jnp.asarray(part, jnp.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        value = _rotated(value ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    found: jax.Array = mixed_bits(value ^ np.uint32(8))
    return found


def _rotated(value: Any, bits: int) -> Any:
    return (value << bits) | (value >> (32 - bits))
