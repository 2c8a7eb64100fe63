"""Weights in fewer bits, as an export stores them: int8 with scales, or bfloat16.

The largest weight of a row of a table, or of a channel (the last dimension) of others, is 127 in int8; its scale is the
weight of 1. The rows are converted some at a time, so beside the result little memory is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflow.lowering.files.narrowing import Narrowing
from dflow.tracing.errors import ExportError
from dflow.tracing.ir.types import ArrayType

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: The largest int8: the image of the largest weight of a row or channel.
_LARGEST = np.float32(127)
_BLOCK_BYTES = 8 << 20


def narrowed_type(type: ArrayType, narrowing: Narrowing) -> ArrayType:
    """Return the type of the array that holds weights of a type."""
    match narrowing:
        case "scale by row":
            return ArrayType(np.dtype(np.float32), type.shape[:1])
        case "scale by channel":
            return ArrayType(np.dtype(np.float32), type.shape[-1:])
        case "bfloat16":
            return ArrayType(_BFLOAT16, type.shape)
        case _:
            return ArrayType(np.dtype(np.int8), type.shape)


def narrowed(name: str, weights: npt.NDArray[Any], narrowing: Narrowing) -> npt.NDArray[Any]:
    """Return what is stored of weights of at least 2 dimensions. Raises ExportError for a NaN or an infinity."""
    if narrowing == "bfloat16":
        found = np.empty(weights.shape, _BFLOAT16)
        for rows, block in _blocks(name, weights):
            found[rows] = block.astype(_BFLOAT16)
        return found
    is_by_row = narrowing.endswith("row")
    scale = _scale(name, weights, is_by_row)
    if narrowing.startswith("scale"):
        return scale
    found = np.empty(weights.shape, np.int8)
    for rows, block in _blocks(name, weights):
        factor = scale[rows].reshape(-1, *[1] * (weights.ndim - 1)) if is_by_row else scale
        found[rows] = np.clip(np.rint(block / factor), -_LARGEST, _LARGEST)
    return found


def _scale(name: str, weights: npt.NDArray[Any], is_by_row: bool) -> npt.NDArray[Any]:
    largest = np.zeros(weights.shape[0] if is_by_row else weights.shape[-1], np.float32)
    for rows, block in _blocks(name, weights):
        if is_by_row:
            largest[rows] = np.abs(block).max(axis=tuple(range(1, weights.ndim)), initial=0.0)
        else:
            np.maximum(largest, np.abs(block).max(axis=tuple(range(weights.ndim - 1)), initial=0.0), out=largest)
    scale = largest / _LARGEST
    return np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))  # weights of 0, or almost


def _blocks(name: str, weights: npt.NDArray[Any]) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
    """Yield some rows after another in float32, with their numbers."""
    count = max(1, _BLOCK_BYTES // max(1, 4 * weights[:1].size))
    for start in range(0, len(weights), count):
        rows = slice(start, start + count)
        block = np.asarray(weights[rows], np.float32)
        if not np.isfinite(block).all():
            raise ExportError(
                f"array {name!r}: expected finite weights, got a NaN or an infinity", "export it without weights="
            )
        yield rows, block
