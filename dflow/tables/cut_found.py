"""Detection of a `scan` over, or a `vmap` of, a pytree whose arrays belong together: it raises an error of its class.

Else JAX would slice the arrays, and fail with an error about ranks and lengths. JAX flattens the pytree first: the
frames of that call show whether `scan` or `vmap` made it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import jax

#: Most frames between the function that flattens a pytree and `scan` or `vmap`.
_MOST_FRAMES = 8


def is_cut(part: Any) -> bool:
    """Return whether JAX flattens `part`, now, for a `scan` over it or a `vmap` of it."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None or not str(frame.f_globals.get("__name__")).startswith(("jax.", "dflow.tables")):
            return False
        held = frame.f_locals
        if frame.f_code.co_name == "scan" and "xs" in held:
            return _is_in(part, held["xs"])
        if frame.f_code.co_name == "vmap_f" and "args" in held:
            return _is_mapped(part, held["args"], held.get("in_axes"))
        frame = frame.f_back
    return False


def _is_mapped(part: Any, args: tuple[Any, ...], in_axes: Any) -> bool:
    axes = in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
    return any(axis is not None and _is_in(part, arg) for arg, axis in zip(args, axes, strict=False))


def _is_in(part: Any, whole: Any) -> bool:
    # Its own flattening, which asks again, is not reached: it is a leaf here.
    leaves = jax.tree_util.tree_leaves(whole, is_leaf=lambda one: one is part)
    return any(one is part for one in leaves)
