"""A table with a vocabulary and its training step, and what the table holds by ids."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import optax

import dflow
from tests.dflow.tables.vocabulary_model import RATE, VocabularyModel


class GrowingTable:
    """A table of rows of 3 numbers. `step` adds 1 to the gradient of each row that it looks up."""

    def __init__(
        self,
        config: dflow.Vocabulary,
        rows: int,
        *,
        name: str = "table",
        place: AbstractContextManager[None] | None = None,
        shards: int | None = None,
        transformation: optax.GradientTransformation | None = None,
    ) -> None:
        self.config = config
        with place or nullcontext():
            self.table = table = dflow.Embedding(rows, 3, vocabulary=config, name=name, shards=shards)
            given = optax.adagrad(RATE) if transformation is None else transformation
            self.optimizer = optimizer = dflow.Optimizer(given, [table], name=f"{name}/optimizer")
        self.slots = optimizer.slots if transformation is None else None

        @dflow.jit
        def step(ids: dflow.WideIds, scale: Any = 1.0) -> Any:
            found = table.find(ids)

            def loss() -> Any:
                return (table(found) * scale).sum()

            optimizer.apply(dflow.grad(loss, [table])(), found=found)
            return table(found)

        self.step = step

    def train(self, ids: Any) -> Any:
        return self.step(dflow.wide_ids(np.asarray(ids, np.int64)))

    def model(self) -> VocabularyModel:
        """The model of the table as it is before the first step."""
        config = self.config
        buckets = self.table.shape[0] // (config.bucket + 1)
        settings = config.bucket, config.evict, config.admit_after
        return VocabularyModel(buckets, *settings, np.array(self.table.read(), np.float32), config.expire_after)

    def owners(self) -> dict[int, int]:
        """The rows that ids own in the whole table, by id. Fails if an id has two rows, even if one has expired."""
        saved = [shard.hooks.saved for shard in self.table.shards]
        ids, born, seen = (
            np.concatenate([np.asarray(one[kind].read()) for one in saved]) for kind in ("ids", "born", "seen")
        )
        rows = np.flatnonzero(born)
        pairs = ids[rows].astype(np.uint64)
        wide = (pairs[:, 0] << np.uint64(32) | pairs[:, 1]).view(np.int64).tolist()
        assert len(set(wide)) == len(wide)
        [clock] = self.clocks()
        oldest = clock - self.config.expire_after if self.config.expire_after else 0
        owned = {id: row for id, row in zip(wide, rows.tolist(), strict=True) if seen[row] > oldest}
        assert sum(int(shard.hooks.used_rows()) for shard in self.table.shards) == len(owned)
        return owned

    def clocks(self) -> set[int]:
        """The clocks of the shards."""
        return {int(shard.hooks.ledger.read()[0]) for shard in self.table.shards}

    def accumulators(self) -> Any:
        """The slots of Adagrad of the whole table."""
        [slots] = self.slots[0].sum_of_squares
        return np.asarray(slots.read())

    def clear(self, initial: Any) -> None:
        """Return to the state before the first step."""
        self.table.assign(initial)
        [slots] = self.slots[0].sum_of_squares
        slots.assign(np.full_like(initial, 0.1))
        for shard in self.table.shards:
            for variable in shard.hooks.saved.values():
                variable.assign(np.zeros(variable.shape, np.uint32))
            ledger = shard.hooks.ledger
            ledger.assign(np.eye(1, ledger.size, dtype=np.uint32)[0])
