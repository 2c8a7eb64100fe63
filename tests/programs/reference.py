"""The meaning of a program by JAX's arrays and transforms alone: dflow traces no part of it.

A variable is a Python cell, so a derivative is plain JAX's: of the function from the values of the cells and the
argument to the result and the final values of the cells.
"""

from __future__ import annotations

import functools
import operator
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
    """A variable, with the methods that `_CHANGES` names too."""

    def __init__(self, value: Any) -> None:
        self.value = jnp.asarray(value)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def read(self) -> Any:
        return self.value

    def gather(self, indices: Any) -> Any:
        """Return rows; an index past an end gives the row at that end, without a gradient."""
        size = self.shape[0]
        rows = self.value[jnp.clip(jnp.where(indices < 0, indices + size, indices), 0, size - 1)]
        inside = (indices >= -size) & (indices < size)
        return jnp.where(inside.reshape(inside.shape + (1,) * (rows.ndim - 1)), rows, jax.lax.stop_gradient(rows))

    def _assign(self, change: Callable[[Any, Any], Any], value: Any, reduce: str | None = None) -> None:
        """Change the value; with `reduce`, by the sum over the batch."""
        self.value = change(self.value, jax.lax.psum(value, _AXIS).astype(self.dtype) if reduce else value)

    def _scatter(self, change: Callable[[Any, Any], Any], indices: Any, rows: Any, reduce: str | None = None) -> None:
        """Change one row after the other; with `reduce`, by the rows of the whole batch."""
        if reduce:
            indices, rows = jax.lax.all_gather(indices, _AXIS), jax.lax.all_gather(rows, _AXIS)
        size = self.shape[0]
        for index, row in zip(indices.reshape(-1), rows.reshape(-1, *self.shape[1:]), strict=True):
            here = jnp.arange(size) == jnp.where(index < 0, index + size, index)
            changed = jnp.broadcast_to(change(self.value, row), self.shape)
            self.value = jnp.where(here.reshape(-1, *[1] * (len(self.shape) - 1)), changed, self.value)


#: Updates by the ends of their methods' names.
_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": jnp.maximum,
    "min": jnp.minimum,
}
for _name, _change in _CHANGES.items():
    setattr(Cell, f"assign_{_name}", functools.partialmethod(Cell._assign, _change))
    setattr(Cell, f"scatter_{_name}", functools.partialmethod(Cell._scatter, _change))
for _name, _set in (("assign", Cell._assign), ("scatter_update", Cell._scatter)):
    setattr(Cell, _name, functools.partialmethod(_set, lambda old, new: new))


class QueueCell:
    """A queue with one user."""

    def __init__(self, model: QueueModel) -> None:
        self.model = model

    def enqueue(self, element: Any) -> None:
        """Enqueue an element, without its gradient."""
        self.model.enqueue([tuple(map(_number, element))])

    def enqueue_many(self, elements: Any) -> None:
        for element in zip(*elements, strict=True):
            self.enqueue(element)

    def dequeue(self) -> Any:
        return tuple(map(jnp.asarray, self.model.dequeue(1)[0]))

    def dequeue_many(self, count: int) -> Any:
        return tuple(map(jnp.stack, zip(*self.model.dequeue(count), strict=True)))

    def dequeue_up_to(self, count: int) -> Any:
        """Dequeue all elements, at most `count`; no program waits here."""
        return self.dequeue_many(count), jnp.int32(count)

    def size(self) -> Any:
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
        vector, indices, rows = self.model.take(count)
        return vector, RowGradient(indices, rows, (5, 1))

    def set_step(self, step: Any) -> None:
        self.model.step = int(step)

    @property
    def step(self) -> Any:
        return jnp.int32(self.model.step)

    def count(self) -> Any:
        return jnp.int32(len(self.model.gradients))

    def dropped(self) -> Any:
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
