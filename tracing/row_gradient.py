"""The gradient of a table of which only some rows were looked up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.errors import GraphTypeError
from dflow.tracing.rows_to_dense import rows_to_dense
from dflow.tracing.source import at, caller


@dataclass(frozen=True, eq=False)
class RowGradient:
    """The rows of a gradient that may differ from zero. Rows for one index add up.

    `indices`  i32[k], each of a row that exists, not sorted; an index may stand more than once
    `rows`     [k, *shape[1:]]
    `shape`    of the whole gradient

    It is a pytree of `indices` and `rows`, so `jax.tree.map` would reach the indices too: scale one by `*`, `/` and
    `-`, add two by `+`, and give `is_leaf=dflow.is_row_gradient` where a tree of gradients is mapped.
    """

    indices: Any
    rows: Any
    shape: tuple[int, ...]

    def dense(self) -> jax.Array:
        """The whole gradient as one array."""
        indices = jnp.where(self.indices < 0, self.indices + self.shape[0], self.indices)
        return rows_to_dense(indices, self.rows, self.shape, "a row gradient")

    @property
    def dtype(self) -> Any:
        """The dtype of the rows."""
        return self.rows.dtype

    def astype(self, dtype: Any) -> RowGradient:
        """The same with rows of another dtype."""
        return replace(self, rows=self.rows.astype(dtype))

    def __mul__(self, factor: Any) -> RowGradient:
        return replace(self, rows=self.rows * self._scalar(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> RowGradient:
        return replace(self, rows=self.rows / self._scalar(divisor))

    def __neg__(self) -> RowGradient:
        return replace(self, rows=-self.rows)

    def __add__(self, other: Any) -> RowGradient:
        if not isinstance(other, RowGradient) or other.shape != self.shape:
            given = f"one of {other.shape}" if isinstance(other, RowGradient) else type(other).__name__
            raise GraphTypeError(
                f"a row gradient of {self.shape} was added to {given}{at(caller())}\n"
                "  add its dense form, gradient.dense()"
            )
        indices = jnp.concatenate([self.indices, other.indices])
        return replace(self, indices=indices, rows=jnp.concatenate([self.rows, other.rows]))

    def _scalar(self, factor: Any) -> Any:
        if jnp.ndim(factor) != 0:
            raise GraphTypeError(
                f"a row gradient of {self.shape} was scaled by an array of {jnp.shape(factor)}{at(caller())}\n"
                "  scale it by a number, or take its dense form, gradient.dense()"
            )
        return factor


jax.tree_util.register_dataclass(RowGradient, data_fields=["indices", "rows"], meta_fields=["shape"])


def is_row_gradient(value: Any) -> bool:
    """Whether `value` is a `RowGradient`; what `jax.tree` functions take as `is_leaf`."""
    return isinstance(value, RowGradient)
