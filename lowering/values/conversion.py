"""Conversion of saved arrays to the dtypes of variables. Values are rounded; any other change is an error."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import CheckpointError

#: The kinds of numbers; an array becomes one of the same kind or of a later one.
_KINDS: tuple[Any, ...] = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def can_convert(saved: Any, held: Any) -> bool:
    """Whether arrays of a dtype may become those of another: float16 to float32, or int32 to bfloat16, not back."""
    kinds = [
        next((rank for rank, kind in enumerate(_KINDS) if jnp.issubdtype(one, kind)), None) for one in (saved, held)
    ]
    return kinds[0] is not None and kinds[1] is not None and kinds[0] <= kinds[1]


def converted(name: str, value: Any, dtype: Any) -> Any:
    """Return an array of `dtype`, with its numbers rounded.

    Raises CheckpointError, which names the array, for an integer that the dtype does not have, and for a number that
    would become infinite.
    """
    array = np.asarray(value)
    with np.errstate(all="ignore"):
        found = array.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        is_lost = (found.astype(array.dtype) != array) | ((found < 0) != (array < 0))
    elif jnp.issubdtype(dtype, jnp.inexact):
        is_lost = np.isfinite(_wide(array)) & ~np.isfinite(_wide(found))
    else:
        return found
    if is_lost.any():
        position = tuple(map(int, np.argwhere(is_lost)[0]))
        raise CheckpointError(
            f"array {name!r}: expected numbers that {np.dtype(dtype).name} holds, got {array[position]} at {position}",
            "restore it into a variable of a wider dtype",
        )
    return found


def _wide(array: Any) -> Any:
    return array if array.dtype.kind in "fcbiu" else array.astype(np.float32)  # float8 and the like have no isfinite
