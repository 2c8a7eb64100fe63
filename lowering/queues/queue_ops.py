"""Queue ops on arrays: conversion of arrays to elements of a shared queue, and back.

Elements are copies of the arrays that they were made of. Batches are split and stacked in host memory, since the
elements of a batch may come from several producers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.queues.channel import Sent
from dflow.lowering.queues.pending_operations import Cancel
from dflow.lowering.queues.queues import SharedQueue
from dflow.lowering.queues.resource_use import OnResults, ResourceUse, copied, giving, nothing_to_cancel
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.host_values import stays_on_host
from dflow.tracing.errors import InternalError
from dflow.tracing.ir.queue_settings import QueueSettings
from dflow.tracing.ir.types import ArrayType, QueueType


class HeldQueue:
    """A queue with the types of its elements."""

    def __init__(self, name: str, settings: QueueSettings, type: QueueType) -> None:
        self.shared = SharedQueue(name, settings)
        self._type = type

    def start(self, use: ResourceUse, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        """Start an op; `on_results` is called once, from any thread. The returned function ends it with an error."""
        queue, give = self.shared, giving(on_results, partial(self._results, use))
        match use.op:
            case "queue.enqueue":
                return queue.enqueue([tuple(map(copied, operands))], give, use.timeout_s, use.where)
            case "queue.enqueue_many":
                return queue.enqueue(_rows(operands), give, use.timeout_s, use.where)
            case "queue.dequeue":
                return queue.dequeue(1, give, use.timeout_s, use.where)
            case "queue.dequeue_many" | "queue.dequeue_up_to":
                fewer = use.op == "queue.dequeue_up_to"
                return queue.dequeue(use.count, give, use.timeout_s, use.where, or_fewer=fewer)
            case "queue.size":
                on_results((jnp.asarray(queue.size(use.where), jnp.int32),))
            case "queue.close":
                queue.close(cancel_pending=use.cancel_pending, where=use.where)
                on_results(())
            case _:
                raise InternalError(f"no queue does {use.op!r}")
        return nothing_to_cancel

    def forget(self, reason: str, remedy: str) -> None:
        """Free the elements. Pending operations and later uses get QueueError with this reason and remedy."""
        self.shared.forget(reason, remedy)

    def depth(self) -> tuple[int, int]:
        """Return the number of elements, and the capacity."""
        return self.shared.depth()

    def contents(self) -> list[tuple[Any, ...]]:
        """Return the elements, for inspection."""
        return self.shared.contents()

    def _results(self, use: ResourceUse, elements: Sequence[tuple[Any, ...]]) -> Sequence[Sent]:
        match use.op:
            case "queue.dequeue":
                return [_given(array) for array in elements[0]]
            case "queue.dequeue_many":
                return self._stacked(elements, use.count)
            case "queue.dequeue_up_to":
                return [*self._stacked(elements, use.count), jnp.asarray(len(elements), jnp.int32)]
        return []

    def _stacked(self, elements: Sequence[tuple[Any, ...]], count: int) -> list[Sent]:
        components = list(zip(*elements, strict=True)) or [()] * len(self._type.components)
        return [_batch(rows, type, count) for rows, type in zip(components, self._type.components, strict=True)]


def _rows(operands: Sequence[Any]) -> list[tuple[Any, ...]]:
    wait_until_computed(operands)
    on_host = [np.array(operand) for operand in operands]
    # With the dots a row of a vector is an array of no dimensions, not a NumPy scalar.
    return [tuple(array[row, ...] for array in on_host) for row in range(len(on_host[0]))]


def _batch(rows: Sequence[Any], type: ArrayType, count: int) -> Sent:
    """Return `count` rows, padded to the largest size in each dimension; missing rows are zeros."""
    arrays = [np.asarray(row) for row in rows]
    shapes = [array.shape for array in arrays] or [tuple(dim or 0 for dim in type.shape)]
    largest = tuple(max(dims) for dims in zip(*shapes, strict=True))
    if len(arrays) == count and all(shape == largest for shape in shapes) and arrays:
        return _given(np.stack(arrays))
    batch = np.zeros((count, *largest), type.dtype)
    for number, array in enumerate(arrays):
        place: Any = (number, *(slice(size) for size in array.shape))
        batch[place] = array
    return _given(batch)


def _given(array: Any) -> Sent:
    return array if isinstance(array, jax.Array) or stays_on_host(array) else jnp.asarray(array)
