"""Branches and loops whose bodies wait: which body runs next, and on what.

Each is a generator: it yields the number of a body with what the body takes, is sent what the body gave, and returns
the results of the whole. Who drives it runs the bodies as it likes, so that no thread waits within a loop.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit

from dflow.lowering.plan import Branch, Scan, While
from dflow.tracing.types import parse_type

#: Yields (body, what it takes), is sent what it gave, returns the results.
Turns = Generator[tuple[int, Sequence[Any]], Sequence[Any], Sequence[Any]]


def turns_of(item: Branch | While | Scan, values: Sequence[Any]) -> Turns:
    """The turns of a branch or loop over the values of the slots that it takes."""
    match item:
        case Branch():
            return _branch(item, values)
        case While():
            return _while(item, values)
        case Scan():
            return _scan(item, values)


def _branch(item: Branch, values: Sequence[Any]) -> Turns:
    index, *operands = values
    number = min(max(int(np.asarray(index)), 0), len(item.bodies) - 1)
    results = yield item.bodies[number], operands
    return results


def _while(item: While, values: Sequence[Any]) -> Turns:
    start = len(values) - item.carry
    kept, carried = values[:start], values[start:]
    while bool(np.asarray((yield item.test, [*kept, *carried])[0])):
        carried = yield item.body, [*kept, *carried]
    return carried


def _scan(item: Scan, values: Sequence[Any]) -> Turns:
    start = len(values) - item.rows
    kept, carried, xs = values[: start - item.carry], values[start - item.carry : start], values[start:]
    stacks = [_Stack(type, item.length) for type in item.stacked]
    numbers = range(item.length)
    for number in reversed(numbers) if item.reverse else numbers:
        results = yield item.body, [*kept, *carried, *(_row(x, number) for x in xs)]
        carried = results[: item.carry]
        for stack, row in zip(stacks, results[item.carry :], strict=True):
            stack.put(number, row)
    return [*carried, *(stack.whole() for stack in stacks)]


class _Stack:
    """Rows put into one array. Keys cannot be written one by one, so they are kept and stacked at the end."""

    def __init__(self, type: str, length: int) -> None:
        row: Any = parse_type(type)
        self._is_plain = not jnp.issubdtype(row.dtype, jax.dtypes.extended)
        self._array = jnp.zeros((length, *row.shape), row.dtype) if self._is_plain else None
        self._rows: dict[int, Any] = {}

    def put(self, number: int, row: Any) -> None:
        if self._is_plain:
            self._array = _put(self._array, _beside(row, self._array), number)
        else:
            first = next(iter(self._rows.values()), row)
            self._rows[number] = _beside(row, first)

    def whole(self) -> Any:
        return self._array if self._is_plain else jnp.stack([row for _, row in sorted(self._rows.items())])


def _beside(row: Any, held: Any) -> Any:
    """A row where those before it are, when it must be moved: it may be what another device handed on."""
    is_apart = isinstance(row, jax.Array) and row.committed and held.committed and row.sharding != held.sharding
    return jax.device_put(row, held.sharding) if is_apart else row


@jax_jit
def _row(array: Any, number: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(array, number, keepdims=False)


def _put_row(array: Any, row: Any, number: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(array, row, number, 0)


_put = jax_jit(_put_row, donate_argnums=0)
