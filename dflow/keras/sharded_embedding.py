"""A Keras layer whose table is a `dflow.Embedding`, divided over tasks."""

from __future__ import annotations

from typing import Any

import keras

from dflow.tables.embedding import Embedding
from dflow.tracing.errors import VariableError


class ShardedEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """Like `keras.layers.Embedding`, with a table in shards on several tasks; no process holds the whole table.

    input_dim, output_dim   number of rows, and of columns
    embeddings_initializer  as in Keras: a name or an initializer
    mask_zero               whether id 0 fills up short rows and is masked
    shards, by, max_shard_bytes, traffic  the division, as for `dflow.Embedding`
    kwargs                  those of a Keras layer

    Build the model in `with cluster.parameter_servers():`, which is where the table is made. Inputs are integers of any
    shape; another one than those from 0 to `input_dim` - 1 is an InputError that names it.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        *,
        shards: int | None = None,
        by: str = "rows",
        max_shard_bytes: int | None = None,
        traffic: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.input_dim, self.output_dim = input_dim, output_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.supports_masking = self.mask_zero = mask_zero
        self.autocast = False
        self._division = {"shards": shards, "by": by, "max_shard_bytes": max_shard_bytes, "traffic": traffic}
        self._table: list[Embedding] = []

    def build(self, input_shape: Any = None) -> None:
        """Make the table, where variables are made now."""
        del input_shape
        self._table[:] = [
            Embedding(
                self.input_dim,
                self.output_dim,
                initializer=lambda key, shape, dtype: self.embeddings_initializer(shape, dtype=dtype),
                name=f"{self.path}/embeddings",
                dtype=self.variable_dtype,
                **self._division,
            )
        ]
        self.built = True

    @property
    def table(self) -> Embedding:
        """The table. Raises VariableError before the layer is built."""
        if not self._table:
            raise VariableError(
                f"layer {self.name!r}: expected a built layer, got one without a table",
                "give the model an input shape: keras.Input((n,), dtype='int32'), or call model.build(shape)",
            )
        return self._table[0]

    def call(self, inputs: Any) -> Any:
        """Look rows up, in the compute dtype of the layer."""
        return keras.ops.cast(self.table(keras.ops.cast(inputs, "int32")), self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """As `keras.layers.Embedding`."""
        del mask
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_spec(self, inputs: Any) -> Any:
        """Return the type of the output, without a look-up."""
        return keras.KerasTensor((*inputs.shape, self.output_dim), dtype=self.compute_dtype)

    def save_own_variables(self, store: Any) -> None:
        """Refuse: a file of Keras would need dflow to be read."""
        del store
        raise VariableError(
            f"layer {self.name!r}: expected a model of Keras's own layers to save, got a dflow.keras.ShardedEmbedding",
            "save what dflow.keras.Model(model).to_keras() returns, or the variables by dflow.save",
        )

    def plain(self) -> Any:
        """Return a new `keras.layers.Embedding` of the same type, with new initial values."""
        return keras.layers.Embedding(
            self.input_dim,
            self.output_dim,
            embeddings_initializer="zeros",
            mask_zero=self.mask_zero,
            name=self.name,
            dtype=self.dtype_policy,
        )
