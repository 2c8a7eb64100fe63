"""MurmurHash3 of ids, for arrays of u32 of JAX or NumPy: tasks that find rows without a step import no JAX for it."""

from __future__ import annotations

from typing import Any

import numpy as np


def mixed_bits(value: Any) -> Any:
    """A hash of u32[...], of the same shape: the finaliser of MurmurHash3."""
    value = (value ^ (value >> 16)) * np.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * np.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def mixed(high: Any, low: Any) -> Any:
    """The hash MurmurHash3 of ids, u32[...] like their parts: each bit depends on all bits of the id.

    The parts are arrays of u32, of JAX or NumPy, and so is the hash.
    """
    value: Any = np.uint32(0)
    for part in (low, high):
        word = _rotated(part * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        value = _rotated(value ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    return mixed_bits(value ^ np.uint32(8))


def _rotated(value: Any, bits: int) -> Any:
    return (value << bits) | (value >> (32 - bits))
