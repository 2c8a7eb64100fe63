"""Queue ops on arrays: conversion of arrays to elements of a shared queue, and back.

Elements are copies of the arrays that they were made of. Batches are split and stacked in host memory, since the
elements of a batch may come from several producers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.queues.channel import Sent
from dflow.lowering.queues.pending_operations import Cancel
from dflow.lowering.queues.queues import SharedQueue
from dflow.lowering.queues.resource_rules import OnResults, Rules, copied, giving, immediate
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.host_values import stays_on_host
from dflow.tracing.ir import ops
from dflow.tracing.ir.queue_settings import QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType, QueueType


class HeldQueue(SharedQueue):
    """A queue with the types of its elements."""

    def __init__(self, name: str, settings: QueueSettings, type: QueueType) -> None:
        super().__init__(name, settings)
        self._type = type

    def start(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        """Start an op; `on_results` is called once, from any thread. The returned function ends it with an error."""
        return _RULES[op.name](self, op, operands, on_results)

    def stacked(self, elements: Sequence[tuple[Any, ...]], count: int) -> list[Sent]:
        """Return the elements row by row; of fewer than `count`, the missing rows are zeros."""
        components = list(zip(*elements, strict=True)) or [()] * len(self._type.components)
        return [_batch(rows, type, count) for rows, type in zip(components, self._type.components, strict=True)]


def _enqueue(queue: HeldQueue, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
    return queue.enqueue([tuple(map(copied, operands))], on_results, op.timeout_s, op.line)


def _enqueue_many(queue: HeldQueue, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
    return queue.enqueue(_rows(operands), on_results, op.timeout_s, op.line)


def _dequeue(queue: HeldQueue, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
    give = giving(on_results, lambda elements: [_given(array) for array in elements[0]])
    return queue.dequeue(1, give, op.timeout_s, op.line)


def _dequeue_many(queue: HeldQueue, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
    give = giving(on_results, lambda elements: queue.stacked(elements, op.count))
    return queue.dequeue(op.count, give, op.timeout_s, op.line)


def _dequeue_up_to(queue: HeldQueue, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
    def made(elements: Sequence[tuple[Any, ...]]) -> list[Sent]:
        return [*queue.stacked(elements, op.count), jnp.asarray(len(elements), jnp.int32)]

    return queue.dequeue(op.count, giving(on_results, made), op.timeout_s, op.line, or_fewer=True)


def _close(queue: HeldQueue, op: ResourceOp, operands: Sequence[Any]) -> Sequence[Sent]:
    queue.close(cancel_pending=op.cancel_pending, where=op.line)
    return ()


_RULES = Rules(
    "queue",
    {
        ops.queue_enqueue: _enqueue,
        ops.queue_enqueue_many: _enqueue_many,
        ops.queue_dequeue: _dequeue,
        ops.queue_dequeue_many: _dequeue_many,
        ops.queue_dequeue_up_to: _dequeue_up_to,
        ops.queue_size: immediate(lambda queue, op, _: [jnp.asarray(queue.size(op.line), jnp.int32)]),
        ops.queue_is_closed: immediate(lambda queue, op, _: [jnp.asarray(queue.is_closed(op.line))]),
        ops.queue_close: immediate(_close),
    },
)


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
