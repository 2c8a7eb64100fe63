"""Alignment of arrays in the buffers that tasks send each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: Arrays start at a multiple of this, so that XLA's CPU client may use them without a copy.
ALIGNMENT_BYTES = 64


def aligned(size_bytes: int) -> int:
    """Return the offset of the next array after one that ends at this offset."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def aligned_zeros(dtype: np.dtype[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return an aligned array of zeros. The memory of a large one is taken when it is first used."""
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size_bytes].view(dtype).reshape(shape)
