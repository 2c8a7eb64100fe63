"""The meaning of a program by JAX's arrays and transforms alone: dflow traces no part of it.

A variable is a Python cell, so a derivative is plain JAX's: of the function from the values of the cells and the
argument to the result and the final values of the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.rows.row_gradient import RowGradient
from tests.programs.machines import AtOnce, ruled, with_rule
from tests.reference.accumulator_model import AccumulatorModel
from tests.reference.queue_model import QueueModel

_AXIS = "batch"


class InexactError(Exception):
    """A derivative became too large for exact addition in float32, so the program tests nothing."""


class Cell:
    """A variable."""

    def __init__(self, value: Any) -> None:
        self.value = jnp.asarray(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return self.value.dtype

    def read(self) -> Any:
        """The value."""
        return self.value

    def gather(self, indices: Any) -> Any:
        """Return rows; an index past an end gives the row at that end, without a gradient."""
        size = self.shape[0]
        rows = self.value[jnp.clip(jnp.where(indices < 0, indices + size, indices), 0, size - 1)]
        inside = (indices >= -size) & (indices < size)
        return jnp.where(inside.reshape(inside.shape + (1,) * (rows.ndim - 1)), rows, jax.lax.stop_gradient(rows))

    def assign(self, value: Any) -> None:
        """Replace."""
        self.value = value

    def assign_add(self, value: Any, reduce: str | None = None) -> None:
        """Add; under a batch, the sum over it."""
        self.value = self.value + (jax.lax.psum(value, _AXIS).astype(self.dtype) if reduce else value)

    def assign_sub(self, value: Any) -> None:
        """Subtract."""
        self.value = self.value - value

    def assign_mul(self, value: Any) -> None:
        """Multiply."""
        self.value = self.value * value

    def assign_max(self, value: Any) -> None:
        """Keep the larger."""
        self.value = jnp.maximum(self.value, value)

    def assign_min(self, value: Any) -> None:
        """Keep the smaller."""
        self.value = jnp.minimum(self.value, value)

    def scatter_add(self, indices: Any, rows: Any, reduce: str | None = None) -> None:
        """Add to rows."""
        if reduce:
            indices, rows = jax.lax.all_gather(indices, _AXIS), jax.lax.all_gather(rows, _AXIS)
        flat = rows.reshape(-1, *self.shape[1:])
        for index, row in zip(indices.reshape(-1), flat, strict=True):
            self._row(index, lambda old, row=row: old + row)

    def scatter_update(self, indices: Any, rows: Any) -> None:
        """Replace rows."""
        for index, row in zip(indices, rows, strict=True):
            self._row(index, lambda old, row=row: row)

    def scatter_sub(self, indices: Any, rows: Any) -> None:
        """Subtract from rows."""
        for index, row in zip(indices, rows, strict=True):
            self._row(index, lambda old, row=row: old - row)

    def scatter_mul(self, indices: Any, rows: Any) -> None:
        """Multiply rows."""
        for index, row in zip(indices, rows, strict=True):
            self._row(index, lambda old, row=row: old * row)

    def scatter_max(self, indices: Any, rows: Any) -> None:
        """Keep the larger of rows."""
        for index, row in zip(indices, rows, strict=True):
            self._row(index, lambda old, row=row: jnp.maximum(old, row))

    def scatter_min(self, indices: Any, rows: Any) -> None:
        """Keep the smaller of rows."""
        for index, row in zip(indices, rows, strict=True):
            self._row(index, lambda old, row=row: jnp.minimum(old, row))

    def _row(self, index: Any, change: Callable[[Any], Any]) -> None:
        size = self.shape[0]
        here = (jnp.arange(size) == jnp.where(index < 0, index + size, index)).reshape(-1, *[1] * (len(self.shape) - 1))
        self.value = jnp.where(here, jnp.broadcast_to(change(self.value), self.shape), self.value)


class QueueCell:
    """A queue with one user."""

    def __init__(self, model: QueueModel) -> None:
        self.model = model

    def enqueue(self, element: Any) -> None:
        """Enqueue an element, without its gradient."""
        self.model.enqueue([tuple(map(_number, element))])

    def enqueue_many(self, elements: Any) -> None:
        """Enqueue elements."""
        for element in zip(*elements, strict=True):
            self.enqueue(element)

    def dequeue(self) -> Any:
        """Dequeue an element."""
        return tuple(map(jnp.asarray, self.model.dequeue(1)[0]))

    def dequeue_many(self, count: int) -> Any:
        """Dequeue elements."""
        return tuple(map(jnp.stack, zip(*self.model.dequeue(count), strict=True)))

    def dequeue_up_to(self, count: int) -> Any:
        """Dequeue all elements, at most `count`; no program waits here."""
        return self.dequeue_many(count), jnp.int32(count)

    def size(self) -> Any:
        """The number of elements."""
        return jnp.int32(len(self.model.elements))


class AccumulatorCell:
    """An accumulator with one user, of a vector and of rows."""

    def __init__(self, model: AccumulatorModel) -> None:
        self.model = model

    def apply(self, gradient: tuple[Any, RowGradient], step: Any) -> bool:
        """Apply a gradient; the sum has no derivative with respect to it."""
        vector, rows = gradient
        return self.model.apply((_number(vector), _number(rows.indices), _number(rows.rows)), int(step))

    def take(self, count: int) -> tuple[Any, RowGradient]:
        """Return the sum."""
        vector, indices, rows = self.model.take(count)
        return vector, RowGradient(indices, rows, (5, 1))

    def set_step(self, step: Any) -> None:
        """Set the step."""
        self.model.step = int(step)

    @property
    def step(self) -> Any:
        """The step."""
        return jnp.int32(self.model.step)

    def count(self) -> Any:
        """Number of gradients in the accumulator."""
        return jnp.int32(len(self.model.gradients))

    def dropped(self) -> Any:
        """Number of stale gradients."""
        return jnp.int32(self.model.dropped)


def _number(value: Any) -> np.ndarray:
    return np.asarray(jax.lax.stop_gradient(value))


class Reference(AtOnce):
    """A program over cells."""

    def within(self) -> Reference:
        """Return the machine itself: JAX differentiates with respect to values."""
        return self

    def batch(self, fn: Callable[..., Any], xs: Any) -> Any:
        """Map by vmap with a named axis, over which cells sum."""
        return jax.vmap(fn, axis_name=_AXIS)(xs)

    def custom(self, how: str, effects: Callable[..., Any], x: Any) -> Any:
        """Do the effects, and separately apply the function with the rule."""
        effects(jax.lax.stop_gradient(x))
        return with_rule(how, ruled)(x)

    def derive(self, how: str, fn: Callable[..., Any], wrt: Sequence[Any], x: Any) -> list[Any]:
        """Differentiate with respect to the values of `wrt` and to x, by JAX."""
        before = [cell.value for cell in self.variables]

        def pure(values: list[Any], x: Any) -> tuple[Any, list[Any]]:
            self._set(self.variables, before)
            self._set(wrt, values)
            return fn(x), [cell.value for cell in self.variables]

        def loss(values: list[Any], x: Any) -> tuple[Any, list[Any]]:
            value, after = pure(values, x)
            return value.sum(), after

        primals = ([cell.value for cell in wrt], x)
        ones = jax.tree.map(jnp.ones_like, primals)
        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        match how:
            case "grad":
                results, after = gradient(*primals)
            case "value_and_grad":
                (value, after), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*primals)
                results = (value, x, grads)
            case "jvp":
                *results, after = jax.jvp(pure, primals, ones, has_aux=True)
            case "vjp":
                value, pull, after = jax.vjp(pure, *primals, has_aux=True)
                results = (value, pull(jnp.ones_like(value)))
            case _:
                _, results, after = jax.jvp(gradient, primals, ones, has_aux=True)
        self._set(self.variables, after)
        leaves = jax.tree.leaves(results)
        for leaf in leaves:
            _check_exact(leaf)
        return leaves

    @staticmethod
    def _set(cells: Sequence[Any], values: Sequence[Any]) -> None:
        for cell, value in zip(cells, values, strict=True):
            cell.value = value


def _check_exact(array: Any) -> None:
    try:
        numbers = np.asarray(jax.lax.stop_gradient(array))
    except jax.errors.TracerArrayConversionError:
        return  # under a batch the sum over it is checked
    if np.abs(numbers).max(initial=0) > 2**16 or (numbers * 256 % 1).any():
        raise InexactError
