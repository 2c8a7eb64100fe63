"""Alignment of arrays in the buffers that tasks send each other."""

from __future__ import annotations

#: Arrays start at a multiple of this, so that XLA's CPU client may use them without a copy.
ALIGNMENT_BYTES = 64


def aligned(size_bytes: int) -> int:
    """Return the offset of the next array after one that ends at this offset."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
