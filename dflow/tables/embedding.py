"""Tables of embeddings: rows looked up by ids, alone or as the sums and means of bags of them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tables.growing_table import (
    counts,
    find,
    grow,
    key_of_literals,
    looked_up_only,
    refuse_found,
    rows_of,
    shape_of_ids,
    vocabulary_of,
)
from dflow.tables.sharded_variable import ShardedVariable, checked_numbers, register
from dflow.tables.vocabulary import FoundIds, Vocabulary, VocabularyCounts
from dflow.tracing.errors import InputError, VariableError
from dflow.tracing.ir.wide_sums import sum_dtype
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.own_scopes import own_scope
from dflow.tracing.primitives.id_checks import nan_unless
from dflow.tracing.source import as_code

#: Numbers of the embeddings without a name.
_unnamed = itertools.count()
#: An initialiser as those of `jax.nn.initializers`: a function of a key, a shape and a dtype.
Initializer = Callable[[Any, tuple[int, ...], Any], Any]


class Embedding(ShardedVariable):
    """A table of `rows` embeddings, each a row of `dim` numbers, in shards on several tasks.

    `initializer`  a function of (key, shape, dtype), such as those of `jax.nn.initializers`; by default normal with
                   the standard deviation 1 / sqrt(dim). Each task computes its own rows, as `ShardedVariable` says
    `key`          for the initialiser; by default made of the name, or without one of the number of the embedding
    `vocabulary`   settings with which the table gives rows to ids of 64 bits as they are used. `rows` is then the
                   number of ids that can have one, rounded up to whole buckets, and `by` is "rows"
    `max_memory`   largest number of bytes in memory of the table, its vocabulary and its optimizers' slots; the rows
                   that are used least lie on the disks of the tasks. At least 32 MiB for each shard
    `shards`, `by`, `max_shard_bytes`, `traffic`, `track_changes`, `name`, `trainable`  as for `ShardedVariable`
    raises         VariableError as `ShardedVariable` does

    In a lookup the ids are deduplicated and divided by shard, and only ids and rows travel; so do the gradient's rows.
    An optimizer that leaves a row without a gradient as it is (SGD, Adagrad) updates the rows that were looked up.
    """

    @suggests_keywords
    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        initializer: Initializer | None = None,
        key: Any = None,
        shards: int | None = None,
        by: str = "rows",
        max_shard_bytes: int | None = None,
        traffic: Any = None,
        track_changes: bool = False,
        vocabulary: Vocabulary | None = None,
        max_memory: int | None = None,
        name: str | None = None,
        dtype: Any = jnp.float32,
        trainable: bool = True,
    ) -> None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise VariableError(f"an embedding: expected a floating dtype, got {jnp.dtype(dtype).name}")
        if rows < 1 or dim < 1:
            raise VariableError(f"an embedding: expected 1 or more rows and dimensions, got {rows} and {dim}")
        draw = jax.nn.initializers.normal(dim**-0.5) if initializer is None else initializer
        seed = f"embedding {next(_unnamed)}" if name is None else name
        drawn_from = jax.random.key(zlib.crc32(seed.encode())) if key is None else key
        together = 1
        if vocabulary is not None:
            _check_vocabulary(vocabulary, track_changes)
            together = vocabulary.bucket + 1
            rows = -(-rows // vocabulary.bucket) * together

        def drawn(key: Any) -> Any:
            return draw(key, (rows, dim), dtype)

        super().__init__(
            lambda: drawn(drawn_from),
            shards=shards,
            by=by,
            max_shard_bytes=max_shard_bytes,
            traffic=traffic,
            track_changes=track_changes,
            together=together,
            max_memory=max_memory,
            name=name,
            trainable=trainable,
        )
        if vocabulary is not None:
            key_again = key_of_literals(drawn_from)
            grow(self, vocabulary, lambda: drawn(key_again()), name)

    def __call__(self, ids: Any) -> jax.Array:
        """The rows of `ids`, integers of any shape: an array of shape `ids.shape + (dim,)`.

        Raises InputError, while the step runs and before it changes the table, for an id that is not from 0 to
        `rows` - 1, which it names; VariableShapeError for ids that are no integers. An exported function gives NaN for
        such an id, and names it in an additional result: `dflow.load` and `dflow serve` then raise the same error.

        With a vocabulary, `ids` is the result of `find` in a step that trains the table; elsewhere ids as `find` takes
        them. An id without a row has the shared row of its bucket.
        """
        with own_scope("lookup", self.name):
            if self.vocabulary is not None:
                return self._rows_found(ids)
            refuse_found(ids, self.name)
            given = self.checked(ids)
            is_row = (given >= 0) & (given < self.shape[0])
            return nan_unless(is_row[..., None], self.rows(jnp.where(is_row, given, 0)))

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The settings of its vocabulary; None if it has none."""
        return vocabulary_of(self)

    def find(self, ids: Any) -> FoundIds:
        """Find the rows of ids, to look them up in a step that trains the table: `table(found)`, `table.bag(found)`.

        ids     integers or strings of any shape: arrays of NumPy, lists, columns, arguments of a `dflow.jit` function,
                or `WideIds`
        raises  VariableError for a table without a vocabulary; InputError as `wide_ids` does

        Nothing changes here. Give the result to the optimizer with the gradients, which are those of these rows:
        `optimizer.apply(gradients, found=found)` gives rows to the new ids.
        """
        with own_scope("find", self.name):
            return find(self, ids)

    def counts(self) -> VocabularyCounts:
        """Numbers of ids found, admitted, evicted and so on. Raises VariableError if it has no vocabulary."""
        return counts(self)

    def _rows_found(self, ids: Any) -> jax.Array:
        if not isinstance(ids, FoundIds):
            return looked_up_only(self, ids)
        if ids.table is not self:
            raise InputError(f"table {self.name!r}: expected ids found in it, got ids found in {ids.table.name!r}")
        return rows_of(ids)

    def _indices(self, method: str, indices: Any) -> jax.Array:
        if self.vocabulary is not None:
            raise VariableError(
                f"{method}: table {self.name!r} has a vocabulary, and its rows have no fixed numbers",
                f"look ids up by {as_code(self.name)}(ids)",
            )
        return super()._indices(method, indices)

    def bag(
        self,
        ids: Any,
        *,
        weights: Any = None,
        combine: str = "sum",
        segments: Any = None,
        bags: int | None = None,
    ) -> jax.Array:
        """The sums or means of bags of rows, an array of shape `(..., dim)`.

        ids       i32[..., n]: the last dimension is a bag; or i32[n] with `segments`
        weights   of the shape of `ids`: factors of the rows; 0 leaves an id out, such as one that fills a short bag
        combine   `sum`, or `mean`: the sum divided by that of the weights, and zero for a bag of the weight 0
        segments  i32[n]: the number of each id's bag, for bags of different sizes; `bags` is the number of bags
        raises    as a lookup does, also for a segment that is not from 0 to `bags` - 1; InputError for an unknown
                  `combine`, shapes that do not fit, and `segments` without `bags`

        A table of few bits, such as bfloat16, is summed in float32, and the sum rounded once.
        """
        shape = shape_of_ids(ids)
        wide = sum_dtype(self.dtype)
        factors = None if weights is None else jnp.asarray(weights, wide)
        if not shape:
            raise InputError("ids of a bag: expected a dimension of ids, got a scalar", "look it up: table(id)")
        if combine not in ("sum", "mean"):
            raise InputError(f"combine: expected 'sum' or 'mean', got {combine!r}", "give one of the two")
        if factors is not None and factors.shape != shape:
            raise InputError(
                f"weights of a bag: expected the shape of the ids, {shape}, got {factors.shape}",
                "give a weight for each id",
            )
        if (segments is None) != (bags is None) or (segments is not None and np.shape(segments) != shape):
            raise InputError(
                f"segments of bags: expected a number for each of the ids {shape}, and bags=, their number; got "
                f"{None if segments is None else np.shape(segments)} and bags={bags}",
                "give both, or neither for bags of one size",
            )

        if segments is not None and bags is not None:
            segments = _checked_segments(segments, bags, self.name)

        def by_bag(values: Any) -> Any:
            return values.sum(len(shape) - 1) if segments is None else jax.ops.segment_sum(values, segments, bags)

        with own_scope("bag", self.name):
            rows = self(ids).astype(wide)
            total: jax.Array = by_bag(rows if factors is None else rows * factors[..., None])
            if combine == "mean":
                weight = by_bag(jnp.ones(shape, wide) if factors is None else factors)[..., None]
                total = jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))
            return total.astype(self.dtype)


def _checked_segments(segments: Any, bags: int, table: str) -> Any:
    given = segments if isinstance(segments, jax.Array) else np.asarray(segments)
    if not jnp.issubdtype(given.dtype, jnp.integer) and given.size:
        raise InputError(f"segments of bags: expected integers, got {given.dtype}", "give the number of each id's bag")
    return checked_numbers(given.astype(np.int32) if not given.size else given, bags, table, "segments")


def _check_vocabulary(given: Any, track_changes: bool) -> None:
    if not isinstance(given, Vocabulary):
        raise VariableError(
            f"vocabulary: expected dflow.Vocabulary or None, got {given!r}", "write vocabulary=dflow.Vocabulary()"
        )
    if track_changes:
        raise VariableError(
            "track_changes: expected a table without a vocabulary, whose rows are always those of the same ids",
            "leave it out, and save the table for copies elsewhere",
        )


register(Embedding)
