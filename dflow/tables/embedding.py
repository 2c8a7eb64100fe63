"""Tables of embeddings: rows looked up by ids, alone or as the sums and means of bags of them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tables.sharded_variable import ShardedVariable, register
from dflow.tracing.errors import InputError, VariableError
from dflow.tracing.near_names import suggests_keywords

#: Numbers of the embeddings without a name.
_unnamed = itertools.count()
#: An initialiser as those of `jax.nn.initializers`: a function of a key, a shape and a dtype.
Initializer = Callable[[Any, tuple[int, ...], Any], Any]


class Embedding(ShardedVariable):
    """A table of `rows` embeddings, each a row of `dim` numbers, in shards on several tasks.

    `initializer`  a function of (key, shape, dtype), such as those of `jax.nn.initializers`; by default normal with
                   the standard deviation 1 / sqrt(dim). Each task computes its own rows, as `ShardedVariable` says
    `key`          for the initialiser; by default made of the name, or without one of the number of the embedding
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
        super().__init__(
            lambda: draw(drawn_from, (rows, dim), dtype),
            shards=shards,
            by=by,
            max_shard_bytes=max_shard_bytes,
            traffic=traffic,
            track_changes=track_changes,
            name=name,
            trainable=trainable,
        )

    def __call__(self, ids: Any) -> jax.Array:
        """The rows of `ids`, integers of any shape: an array of shape `ids.shape + (dim,)`.

        Raises InputError, while the step runs and before it changes the table, for an id that is not from 0 to
        `rows` - 1, which it names; VariableShapeError for ids that are no integers. In an exported function, which runs
        without this check, the row of such an id is NaN.
        """
        given = self.checked(ids)
        is_row = (given >= 0) & (given < self.shape[0])
        return jnp.where(is_row[..., None], self.rows(jnp.where(is_row, given, 0)), jnp.nan)

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
        raises    as a lookup does; InputError for an unknown `combine`, shapes that do not fit, and `segments` without
                  `bags`
        """
        shape = np.shape(ids)
        factors = None if weights is None else jnp.asarray(weights, self.dtype)
        if not shape:
            raise InputError("ids of a bag: expected a dimension of ids, got a scalar", "look it up: table(id)")
        if combine not in ("sum", "mean"):
            raise InputError(f"combine: expected 'sum' or 'mean', got {combine!r}", "give one of the two")
        if factors is not None and factors.shape != shape:
            raise InputError(
                f"weights of a bag: expected the shape of the ids, {shape}, got {factors.shape}",
                "give a weight for each id",
            )
        if (segments is None) != (bags is None) or (segments is not None and jnp.shape(segments) != shape):
            raise InputError(
                f"segments of bags: expected a number for each of the ids {shape}, and bags=, their number; got "
                f"{None if segments is None else jnp.shape(segments)} and bags={bags}",
                "give both, or neither for bags of one size",
            )

        def by_bag(values: Any) -> Any:
            return values.sum(len(shape) - 1) if segments is None else jax.ops.segment_sum(values, segments, bags)

        rows = self(ids)
        total: jax.Array = by_bag(rows if factors is None else rows * factors[..., None])
        if combine == "sum":
            return total
        # The weight of a bag may have more bits than bfloat16.
        weight = by_bag(jnp.ones(shape) if factors is None else factors.astype(jnp.float32))[..., None]
        return jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight)).astype(self.dtype)


register(Embedding)
