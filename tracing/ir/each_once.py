"""Which of an array's numbers are equal, found by hashing: on a CPU in an eighth of the time of sorting them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Cells of the hash table for each number, at the least. With 2, fewer than two numbers in five need a second round.
ROOM = 2


def representatives(numbers: Any, is_wanted: Any = None, *, upper: Any = None) -> Any:
    """For each of `numbers`, i32[n], the position of the first one that is equal: i32[n].

    is_wanted  bool[n]; a number that is not wanted has its own position, and no other number has that
    upper      the upper 32 bits of each number of 64 bits, like `numbers`, which are then the lower ones

    In each round every number that is still open goes to a cell of a hash table, where the first one of them stays.
    The numbers equal to it are represented by it; the others go on with another hash. So each round ends at least one
    number for each cell in use, and two rounds or three end nearly all.
    """
    [count] = numbers.shape
    positions = jnp.arange(count, dtype=jnp.int32)
    cells = 1 << max(1, ROOM * count - 1).bit_length()

    def is_open(carry: Any) -> Any:
        return carry[1].any()

    def one_round(carry: Any) -> Any:
        found, still_open, seed = carry
        hashed = mixed_bits(numbers.astype(jnp.uint32) ^ seed)
        if upper is not None:
            hashed = mixed_bits(hashed ^ upper.astype(jnp.uint32))
        cell = jnp.where(still_open, (hashed & np.uint32(cells - 1)).astype(jnp.int32), cells)
        empty = jnp.full(cells, max(0, count - 1), jnp.int32)
        first = empty.at[cell].min(positions, mode="drop").at[cell].get(mode="clip")
        ends = still_open & (numbers[first] == numbers)
        if upper is not None:
            ends &= upper[first] == upper
        return jnp.where(ends, first, found), still_open & ~ends, seed * np.uint32(747796405) + np.uint32(2891336453)

    wanted = jnp.ones(count, bool) if is_wanted is None else is_wanted
    found, _, _ = jax.lax.while_loop(is_open, one_round, (positions, wanted, jnp.uint32(0)))
    return found


def mixed_bits(value: Any) -> Any:
    """A hash of u32[...], of the same shape: the finaliser of MurmurHash3."""
    value = (value ^ (value >> 16)) * np.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * np.uint32(0xC2B2AE35)
    return value ^ (value >> 16)
