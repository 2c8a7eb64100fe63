"""The gradient of a table in the rows that were looked up.

`jax.tree.map` over a pytree computes with every leaf, and the sum of two indices is another index. So the leaf that
stands for the indices is an array of JAX's keys: JAX selects, stacks and returns keys, and raises for any arithmetic.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import GraphTypeError
from dflow.tracing.rows.rows_to_dense import rows_to_dense


@dataclass(frozen=True, eq=False)
class RowGradient:
    """The rows of a gradient that may differ from zero. Rows for one index add up.

    `indices`  i32[k], unsorted indices of existing rows; an index may occur more than once
    `rows`     [k, *shape[1:]]
    `shape`    of the whole gradient

    It is a pytree, which functions of JAX take and return. Its indices are a leaf of a PRNG key dtype, so that
    `jax.tree.map` cannot compute with them by mistake: arithmetic raises JAX's error about a `key` dtype, and a method
    of arrays such as `leaf.astype` one about an abstract method. But functions that accept keys, such as `leaf.reshape`
    and `jnp.zeros_like`, change the indices. Scale a row gradient by `*`, `/` and `-`, add two by `+`, and map a tree
    of gradients with `is_leaf=dflow.is_row_gradient`.
    """

    indices: Any
    rows: Any
    shape: tuple[int, ...]

    def dense(self) -> jax.Array:
        """The whole gradient as one array."""
        self.check()
        indices = jnp.where(self.indices < 0, self.indices + self.shape[0], self.indices)
        return rows_to_dense(indices, self.rows, self.shape, "a row gradient")

    def check(self) -> None:
        """Raise GraphTypeError unless there is an integer for each row, and the rows are of the shape."""
        indices, rows = (jax.typeof(part) for part in (self.indices, self.rows))
        is_whole = jnp.issubdtype(indices.dtype, jnp.integer)
        if not is_whole or indices.shape != rows.shape[:1] or rows.shape[1:] != self.shape[1:]:
            row = ",".join(["k", *map(str, self.shape[1:])])
            raise GraphTypeError(
                f"a row gradient of {self.shape}: expected indices int32[k] and rows [{row}], "
                f"got {indices.str_short()} and {rows.str_short()}",
                "map a tree of gradients with is_leaf=dflow.is_row_gradient, or take gradient.dense()",
            )

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
                f"a row gradient of {self.shape} was added to {given}", "add its dense form, gradient.dense()"
            )
        self.check()
        other.check()
        indices = jnp.concatenate([self.indices, other.indices])
        return replace(self, indices=indices, rows=jnp.concatenate([self.rows, other.rows]))

    def _scalar(self, factor: Any) -> Any:
        if jnp.ndim(factor) != 0:
            raise GraphTypeError(
                f"a row gradient of {self.shape} was scaled by an array of {jnp.shape(factor)}",
                "scale it by a number, or take its dense form, gradient.dense()",
            )
        return factor


_KIND = "threefry2x32"


@functools.cache
def _sealed_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=_KIND)).dtype


def _sealed(indices: Any) -> Any:
    """Integer indices as PRNG keys; any other value unchanged."""
    is_array = isinstance(indices, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    if not is_array or not jnp.issubdtype(indices.dtype, jnp.integer):
        return indices
    if isinstance(indices, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(indices.shape, _sealed_dtype())
    bits = jnp.asarray(indices, jnp.int32).astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack([bits, jnp.zeros_like(bits)], axis=-1), impl=_KIND)


def _opened(leaf: Any) -> Any:
    """The inverse of `_sealed`."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or leaf.dtype != _sealed_dtype():
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.int32)
    return jax.random.key_data(leaf)[..., 0].astype(jnp.int32)


def _flattened(gradient: RowGradient) -> tuple[Any, tuple[int, ...]]:
    key = jax.tree_util.GetAttrKey
    return ((key("indices"), _sealed(gradient.indices)), (key("rows"), gradient.rows)), gradient.shape


def _unflattened(shape: tuple[int, ...], children: Any) -> RowGradient:
    indices, rows = children
    return RowGradient(_opened(indices), rows, shape)


jax.tree_util.register_pytree_with_keys(RowGradient, _flattened, _unflattened)


def is_row_gradient(value: Any) -> bool:
    """Whether `value` is a `RowGradient`; what `jax.tree` functions take as `is_leaf`."""
    return isinstance(value, RowGradient)
