"""Which of an array's numbers are equal, found by hashing: on a CPU in an eighth of the time of sorting them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.ir.id_hash import mixed_bits

#: Cells of the hash table for each number, at the least. With 2, fewer than two numbers in five need a second round.
ROOM = 2


#: Number of cells for an open number of numbers.
OPEN_CELLS = 1 << 15


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
    # Of an open number, as in an export, the table has a fixed size; more numbers take more rounds.
    is_known = isinstance(count, int)
    cells = 1 << max(1, ROOM * count - 1).bit_length() if is_known else OPEN_CELLS
    last = max(0, count - 1) if is_known else np.uint32(2**32 - 1)

    def is_open(carry: Any) -> Any:
        return carry[0].min(initial=0) < 0

    def one_round(carry: Any) -> Any:
        found, number = carry  # -1 for a number that is still open
        seed = number.astype(jnp.uint32) * np.uint32(747796405)
        hashed = mixed_bits(numbers.astype(jnp.uint32) ^ seed)
        if upper is not None:
            hashed = mixed_bits(hashed ^ upper.astype(jnp.uint32))
        # Unsigned indices, as JAX asks of signed ones whether they are negative.
        cell = jnp.where(found < 0, hashed & np.uint32(cells - 1), np.uint32(cells))
        empty = jnp.full(cells, last, jnp.uint32)
        first = empty.at[cell].min(positions.astype(jnp.uint32), mode="drop").at[cell].get(mode="clip")
        is_equal = numbers.at[first].get(mode="clip") == numbers
        if upper is not None:
            is_equal &= upper.at[first].get(mode="clip") == upper
        return jnp.where((found < 0) & is_equal, first.astype(jnp.int32), found), number + 1

    wanted = -1 if is_wanted is None else jnp.where(is_wanted, -1, positions)
    found, _ = jax.lax.while_loop(is_open, one_round, (jnp.broadcast_to(wanted, (count,)), jnp.int32(0)))
    return found
