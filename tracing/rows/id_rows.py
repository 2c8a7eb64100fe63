"""The rows of ids in a shard of a table with a vocabulary, found on the host: for tasks that look up without a step.

The steps of a cluster find them by `dflow.tables.shard_vocabulary`, whose file describes the buckets; both give the
same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dflow.tracing.ir.id_hash import mixed


class IdRows(msgspec.Struct, frozen=True):
    """How ids have rows in one shard.

    settings  those of the vocabulary: the number of its rule of eviction, `admit_after`, `bucket`, and `expire_after`
              or 0
    buckets   number of buckets of the table, and `first`, the number of the shard's first one
    ids, born, seen, ledger  names of the variables beside the shard
    """

    settings: tuple[int, int, int, int]
    buckets: int
    first: int
    ids: str
    born: str
    seen: str
    ledger: str

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables beside the shard that a lookup reads."""
        return self.ids, self.born, self.ledger, *([self.seen] if self.settings[3] else [])

    def has(self, ids: npt.NDArray[np.uint32], row_count: int) -> npt.NDArray[np.bool_]:
        """Return whether ids, u32[n, 2], have their buckets in this shard of `row_count` rows."""
        bucket = self._buckets(ids)
        return (bucket >= 0) & (bucket < row_count // (self.settings[2] + 1))

    def find(
        self, ids: npt.NDArray[np.uint32], rows_of: Callable[[str, npt.NDArray[Any]], npt.NDArray[Any]]
    ) -> npt.NDArray[np.int64]:
        """Return the rows of ids of this shard, u32[n, 2]: its own, or the one that its bucket shares.

        rows_of  returns the rows of a variable by its name and the numbers of the rows
        """
        own, expire_after = self.settings[2:]
        bucket = self._buckets(ids)
        places = bucket[:, None] * (own + 1) + np.arange(own)
        clock = int(rows_of(self.ledger, np.zeros(1, np.int64))[0])
        born = rows_of(self.born, places)
        is_own = (rows_of(self.ids, places) == ids[:, None]).all(-1) & (born > 0) & (born <= clock)
        if expire_after:
            is_own &= rows_of(self.seen, places) > max(clock, expire_after) - expire_after
        cell = np.where(is_own.any(1), is_own.argmax(1), own)
        return bucket * (own + 1) + cell

    def _buckets(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Return the numbers in this shard of the buckets of ids; outside of it for those of other shards."""
        hashed: npt.NDArray[Any] = mixed(ids[:, 0], ids[:, 1])
        return (hashed % np.uint32(self.buckets)).astype(np.int64) - self.first
