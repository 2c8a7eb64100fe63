"""Ids of 64 bits, each as two numbers of 32: JAX has no more bits unless `jax_enable_x64` is set."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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
    raises  InputError for a JAX array of fewer than 64 bits, which may have lost the upper ones, and for other values:
            it names the first, its position, and the column if `ids` is a pandas or Polars column
    """
    name = getattr(ids, "name", None)
    return wide_ids_of(ids, f"wide ids of column {name!r}" if isinstance(name, str) else "wide ids")


def wide_ids_of(ids: Any, what: str) -> WideIds:
    """Like `wide_ids`; `what` is the noun for the ids in errors."""
    if isinstance(ids, jax.Array):
        if ids.dtype.itemsize < 8 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise InputError(
                f"{what}: expected NumPy integers or strings, got a JAX array of {ids.dtype}: JAX keeps 32 bits of "
                f"each number",
                "make them of the NumPy ids, before a function of dflow.jit gets them: step(dflow.wide_ids(ids))",
            )
        return WideIds((ids >> 32).astype(jnp.uint32), ids.astype(jnp.uint32))
    array = _array(ids, what)
    if array.dtype == object and all(isinstance(id, str | bytes) for id in array.flat):
        hashed = [_hash(id) for id in array.flat]
        array = np.array(hashed, np.uint64).reshape(array.shape)
    elif array.dtype == object and all(_is_integer(id) for id in array.flat):
        array = np.array([int(id) % 2**64 for id in array.flat], np.uint64).reshape(array.shape)
    if not np.issubdtype(array.dtype, np.integer):
        raise _no_ids(array, what)
    bits = array.astype(np.int64 if np.issubdtype(array.dtype, np.signedinteger) else np.uint64).view(np.uint64)
    return WideIds((bits >> np.uint64(32)).astype(np.uint32), bits.astype(np.uint32))


def _array(ids: Any, what: str) -> np.ndarray[Any, Any]:
    """The ids as an array; strings, and integers of Python, as objects, which NumPy would convert to one another."""
    if isinstance(ids, Mapping):
        raise InputError(
            f"{what}: expected one column, got a {type(ids).__name__} of {len(ids)}",
            "make them of each column: {name: dflow.wide_ids(columns[name]) for name in columns}",
        )
    try:
        array = np.asarray(ids)
        if isinstance(ids, list | tuple) and array.dtype.kind not in "iu":
            array = np.asarray(ids, object)
    except ValueError:
        raise InputError(
            f"{what}: expected rows of one length, got rows of several lengths", "pad them with an id of their own"
        ) from None
    if isinstance(ids, np.ma.MaskedArray) and ids.mask.any():
        raise _missing("a masked id", np.argwhere(ids.mask)[0], what, of_numbers=array.dtype.kind in "iuf")
    if not array.size and array.dtype == np.float64:
        return array.astype(np.int64)
    return array.astype(object) if array.dtype.kind in "UST" else array


def _is_integer(id: Any) -> bool:
    return isinstance(id, int | np.integer) and not isinstance(id, bool) and -(2**63) <= int(id) < 2**64


def _is_missing(id: Any) -> bool:
    is_nan = isinstance(id, float | np.floating) and bool(id != id)
    return id is None or is_nan or type(id).__name__ in ("NAType", "NaTType")  # the last two are pandas'


def _no_ids(array: np.ndarray[Any, Any], what: str) -> InputError:
    """The error for an array that has other values than integers and strings: it names the first of them."""
    if array.dtype.kind == "f" or array.dtype == object:
        for position, id in np.ndenumerate(array):
            if _is_missing(id):
                return _missing(str(id), position, what, of_numbers=array.dtype != object or _has_numbers(array))
    if array.dtype == object:
        are_strings = isinstance(array.flat[0], str | bytes)
        for position, id in np.ndenumerate(array):
            if isinstance(id, int) and not isinstance(id, bool) and not are_strings and not _is_integer(id):
                return InputError(
                    f"{what}: expected integers of at most 64 bits, got {id}{_at(position)}",
                    "give the ids as strings, str(id)",
                )
            if not (isinstance(id, str | bytes) if are_strings else _is_integer(id)):
                return InputError(
                    f"{what}: expected {'strings' if are_strings else 'integers'} alone, got {id!r} "
                    f"({type(id).__name__}){_at(position)}",
                    f"convert them first, for instance by column.astype({'int' if isinstance(id, float) else 'str'})",
                )
    return InputError(f"{what}: expected integers or strings, got {array.dtype}", "convert them first: ids.astype(int)")


def _missing(id: str, position: Any, what: str, *, of_numbers: bool) -> InputError:
    own = "fillna(-1).astype(int)" if of_numbers else "fillna('')"
    return InputError(
        f"{what}: expected integers or strings, got {id}{_at(position)}",
        f"leave its row out, or give the missing an id of their own, such as column.{own} in pandas",
    )


def _has_numbers(array: np.ndarray[Any, Any]) -> bool:
    return any(isinstance(id, int | np.integer) for id in array.flat)


def _at(position: Any) -> str:
    return f" at {tuple(map(int, position))}" if len(position) else ""


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
