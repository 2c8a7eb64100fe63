"""A queue with one user at a time: what the queue ops mean.

The reference for tests of every other queue, so it is a list and nothing more. It never waits: an op that would have
to wait is an error of the program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import DeadlineExceeded, QueueClosed
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Node
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.types import ArrayType


class QueueModel:
    """The elements of a queue, first in first, and whether it is closed."""

    def __init__(self, settings: QueueSettings, elements: Sequence[Any] = (), is_closed: bool = False) -> None:
        self.settings = settings
        self.elements = list(elements)
        self.is_closed = is_closed
        self._random = random.Random(settings.seed)

    def copy(self) -> QueueModel:
        other = QueueModel(self.settings, self.elements, self.is_closed)
        other._random.setstate(self._random.getstate())
        return other

    def enqueue(self, elements: Sequence[Any]) -> None:
        """Put elements in. Raises QueueClosed, or DeadlineExceeded when they do not fit."""
        if self.is_closed:
            raise QueueClosed("an enqueue on a closed queue")
        if len(self.elements) + len(elements) > self.settings.capacity:
            raise DeadlineExceeded(f"an enqueue of {len(elements)} waits for ever: {self}")
        self.elements += elements

    def dequeue(self, count: int, or_fewer: bool = False) -> list[Any]:
        """Take elements out. Raises QueueClosed, or DeadlineExceeded when there are too few."""
        held_back = 0 if self.is_closed else self.settings.min_after_dequeue
        if self.is_closed and or_fewer and self.elements:
            count = min(count, len(self.elements))
        if count and len(self.elements) - held_back < count:
            if self.is_closed:
                raise QueueClosed(f"a dequeue of {count} on a closed queue: {self}")
            raise DeadlineExceeded(f"a dequeue of {count} waits for ever: {self}")
        return [self._next() for _ in range(count)]

    def close(self) -> None:
        self.is_closed = True

    def use(self, node: Node, operands: Sequence[Any]) -> list[Any]:
        return _MEANINGS[node.op](self, node, operands) or []

    def _next(self) -> Any:
        match self.settings.kind:
            case QueueKind.FIFO:
                return self.elements.pop(0)
            case QueueKind.PRIORITY:
                return self.elements.pop(min(range(len(self.elements)), key=self._priority))
            case QueueKind.SHUFFLE:
                place = self._random.randrange(len(self.elements))
                self.elements[place], self.elements[-1] = self.elements[-1], self.elements[place]
                return self.elements.pop()

    def _priority(self, place: int) -> int:
        return int(np.asarray(self.elements[place][0]))

    def __str__(self) -> str:
        return f"it holds {len(self.elements)} of at most {self.settings.capacity}"


def _stacked_elements(node: Node, elements: Sequence[Any]) -> list[Any]:
    """The elements row by row, with zeros in the rows that are missing."""
    results = []
    for place, value in enumerate(node.outputs):
        assert isinstance(value.type, ArrayType)
        if len(value.type.shape) == 0:
            break  # the number of elements, beside them
        rows = [element[place] for element in elements]
        missing = value.type.shape[0] - len(rows)
        rows += [jnp.zeros(value.type.shape[1:], value.type.dtype)] * missing
        results.append(jnp.stack(rows) if rows else jnp.zeros(value.type.shape, value.type.dtype))
    return results


def _rows(arrays: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [tuple(array[row] for array in arrays) for row in range(len(arrays[0]))]


def _dequeue_up_to(queue: QueueModel, node: Node, operands: Sequence[Any]) -> list[Any]:
    taken = queue.dequeue(node.attributes["count"], or_fewer=True)
    return [*_stacked_elements(node, taken), jnp.int32(len(taken))]


_MEANINGS: Mapping[OpDef, Callable[[QueueModel, Node, Sequence[Any]], list[Any] | None]] = {
    ops.queue_enqueue: lambda queue, node, operands: queue.enqueue([tuple(operands)]),
    ops.queue_enqueue_many: lambda queue, node, operands: queue.enqueue(_rows(operands)),
    ops.queue_dequeue: lambda queue, node, _: list(queue.dequeue(1)[0]),
    ops.queue_dequeue_many: lambda queue, node, _: _stacked_elements(node, queue.dequeue(node.attributes["count"])),
    ops.queue_dequeue_up_to: _dequeue_up_to,
    ops.queue_size: lambda queue, node, _: [jnp.int32(len(queue.elements))],
    ops.queue_is_closed: lambda queue, node, _: [jnp.asarray(queue.is_closed)],
    ops.queue_close: lambda queue, node, _: queue.close(),
}
