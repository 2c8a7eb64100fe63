"""Queues shared by threads: a `QueueMachine` with a callback and a deadline for each pending operation.

The elements in a queue are copies of the arrays that they were made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from dflow.lowering.queues.channel import Sent
from dflow.lowering.queues.pending_operations import (
    Cancel,
    Found,
    OnDone,
    OnResults,
    Rule,
    SavedContents,
    SharedResource,
    Waiter,
)
from dflow.lowering.queues.queue_machine import (
    Element,
    ElementOrder,
    PriorityOrder,
    QueueCommand,
    QueueMachine,
    Serve,
    ShuffleOrder,
)
from dflow.lowering.queues.resource_rules import copied, giving, immediate, property_of
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.host_values import as_operand
from dflow.lowering.values.index_set import IndexSet
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DflowError, FeedError, QueueClosed, QueueError
from dflow.tracing.ir import ops
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import FedElement, ResourceOp
from dflow.tracing.ir.types import ArrayType, QueueType

#: Remedies for a queue that cannot take or give elements: at a deadline, and when it is closed.
_LATE = {
    "take": "does every thread that dequeues still run? timeout_s says how long to wait",
    "give": "does every thread that enqueues still run? timeout_s says how long to wait",
}
_CLOSED = {
    "take": "close it after the last enqueue, or make a new queue",
    "give": "stop at dflow.QueueClosed, or take what is left by dequeue_up_to",
}


class HeldQueue(SharedResource):
    """A queue of elements, each a tuple of arrays. Every method may be called from any thread."""

    kind = "queue"
    error = QueueError
    machine: QueueMachine

    def __init__(self, name: str, settings: QueueSettings, type: QueueType) -> None:
        super().__init__()
        self.name = name
        self._settings, self._type = settings, type
        self.machine = QueueMachine(settings.capacity, order_of(settings))
        #: What `fail` was given: the text of the error, the line where the queue is fed, and the error.
        self._failure: tuple[str, str, BaseException | None] | None = None

    def enqueue(
        self,
        elements: Sequence[Element],
        on_done: OnDone,
        timeout_s: float,
        where: str = "",
        of: FedElement | None = None,
    ) -> Cancel:
        """Put the elements in, in order; return the function that cancels this.

        `on_done` is called once, from any thread, when all elements are in, or with an error: QueueClosed,
        DeadlineExceeded after `timeout_s`, or the error of the cancellation. Elements that were put in before an error
        stay in. The one element `of` a feed is put in once, however often it is given.
        """
        if self._settings.kind is QueueKind.PRIORITY:
            # Computed here, so that no thread waits for a device with the lock held.
            elements = [(np.asarray(element[0]), *element[1:]) for element in elements]
        waiter = Waiter(f"take {_elements(len(elements))}", on_done, timeout_s, where, count=len(elements))
        return self._ask(waiter, lambda ticket: self.machine.enqueue(ticket, elements, of))

    def dequeue(
        self, count: int, on_done: OnDone, timeout_s: float, where: str = "", *, or_fewer: bool = False
    ) -> Cancel:
        """Take `count` elements, like `enqueue`; with `or_fewer`, take the rest of a closed queue that is not empty."""
        waiter = Waiter(f"give {_elements(count)}", on_done, timeout_s, where)
        return self._ask(waiter, lambda ticket: self.machine.dequeue(ticket, count, or_fewer))

    def close(self, *, cancel_pending: bool = False, where: str = "") -> None:
        """Refuse later enqueues; with `cancel_pending`, pending ones fail too."""
        self._do(lambda: self.machine.close(cancel_pending), where)

    def fail(self, failure: str, fed: str, cause: BaseException | None = None) -> None:
        """Close the queue because the feed that fills it failed.

        A later enqueue, and a dequeue of more elements than it holds, raise FeedError with `failure` (the text of the
        error), `fed` (the line that feeds the queue) and `cause`.
        """

        def close() -> list[QueueCommand]:
            self._failure = self._failure or (failure, fed, cause)
            return self.machine.close(cancel_pending=True)

        self._do(close, fed)

    def depth(self) -> tuple[int, int]:
        """Return the number of elements and the capacity; for a queue that was forgotten, 0 and the capacity."""
        with self._lock:
            return len(self.machine.order), self.machine.capacity

    def contents(self) -> list[Element]:
        """Return the elements, for inspection."""
        with self._lock:
            return self.machine.order.contents()

    def fed(self, feed: str) -> IndexSet:
        """Return the numbers of the elements of a feed that were put in."""
        with self._lock:
            return IndexSet(self.machine.fed[feed].ranges()) if feed in self.machine.fed else IndexSet()

    def forget_fed(self, feed: str) -> None:
        """Forget which elements of a feed were put in; it puts in no more."""
        with self._lock:
            self.machine.fed.pop(feed, None)

    def saved(self) -> SavedContents:
        """See `SharedResource`. The elements of a component are in one array without dimensions, one after another."""
        with self._lock:
            order, is_closed, failure = self.machine.order, self.machine.is_closed, self._failure
            elements = order.contents()
            random = None if order.random is None else order.random.getstate()
            fed = {feed: known.pairs() for feed, known in self.machine.fed.items()}
        components = list(zip(*elements, strict=True))
        numbers = {
            "is_closed": is_closed,
            "failure": None if failure is None else failure[:2],
            "random": random,
            "fed": fed,
            "shapes": [[np.shape(part) for part in parts] for parts in components],
        }
        arrays = {
            str(index): np.concatenate([np.asarray(part).reshape(-1) for part in parts])
            for index, parts in enumerate(components)
        }
        return SavedContents(numbers, arrays)

    def return_to(self, saved: SavedContents) -> None:
        """See `SharedResource`. A queue that was closed since stays closed: its producers may have ended."""
        numbers, order = saved.numbers, order_of(self._settings)
        components = [_cut(saved.arrays[str(index)], shapes) for index, shapes in enumerate(numbers["shapes"])]
        for element in zip(*components, strict=True):
            order.push(element)
        if order.random is not None:
            version, internal, gauss = numbers["random"]
            order.random.setstate((version, tuple(internal), gauss))

        fed = {feed: IndexSet.of(parts) for feed, parts in numbers.get("fed", {}).items()}

        def act() -> list[QueueCommand]:
            if numbers["failure"] is not None:
                self._failure = self._failure or (*numbers["failure"], None)
            return self.machine.return_to(order, numbers["is_closed"], fed)

        self._do(act, "")

    def _answer(self, command: QueueCommand) -> tuple[int, Outcome[Found]]:
        if isinstance(command, Serve):
            return command.ticket, command.elements
        return command.ticket, self._closed(self._waiters[command.ticket], command.left)

    def _closed(self, waiter: Waiter, left: int) -> DflowError:
        if self._failure is None:
            what = f"{waiter.what}{_part(waiter, left)}"
            fact = f"queue {self.name!r} is closed and cannot {what}; {self._held()}{waiter.where}"
            return QueueClosed(fact, _CLOSED[waiter.what.split()[0]])
        failure, fed, cause = self._failure
        error = FeedError(
            f"queue {self.name!r} cannot {waiter.what}, because what feeds it failed; {self._held()}{waiter.where}",
            f"it raised {failure}\n  it is fed{fed}",
        )
        error.__cause__ = cause
        return error

    def _too_late(self, ticket: int, waiter: Waiter) -> str:
        part = _part(waiter, self.machine.left(ticket))
        fact = f"queue {self.name!r} could not {waiter.what} within {waiter.timeout_s:g} s{part}; {self._held()}"
        return f"{fact}{waiter.where}\n  {_LATE[waiter.what.split()[0]]}"

    def _clear(self) -> None:
        self.machine = QueueMachine(self._settings.capacity, order_of(self._settings))

    def _held(self) -> str:
        return f"it holds {len(self.machine.order)} of at most {self.machine.capacity}"

    def _enqueue_one(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        return self.enqueue([tuple(map(copied, operands))], on_results, op.timeout_s, op.line, op.of)

    def _enqueue_many(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        return self.enqueue(_rows_of(operands), on_results, op.timeout_s, op.line)

    def _dequeue_one(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        give = giving(on_results, lambda elements: [*map(as_operand, elements[0])])
        return self.dequeue(1, give, op.timeout_s, op.line)

    def _dequeue_many(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        give = giving(on_results, lambda elements: self._stacked(elements, op.count))
        return self.dequeue(op.count, give, op.timeout_s, op.line)

    def _dequeue_up_to(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        def made(elements: Sequence[Element]) -> list[Sent]:
            return [*self._stacked(elements, op.count), np.asarray(len(elements), np.int32)]

        return self.dequeue(op.count, giving(on_results, made), op.timeout_s, op.line, or_fewer=True)

    def _close(self, op: ResourceOp, operands: Sequence[Any]) -> tuple[()]:
        self.close(cancel_pending=op.cancel_pending, where=op.line)
        return ()

    def _stacked(self, elements: Sequence[Element], count: int) -> list[Sent]:
        components = list(zip(*elements, strict=True)) or [()] * len(self._type.components)
        return [_batch_of(rows, type, count) for rows, type in zip(components, self._type.components, strict=True)]

    rules: ClassVar[Mapping[str, Rule]] = {
        ops.queue_enqueue.name: _enqueue_one,
        ops.queue_enqueue_many.name: _enqueue_many,
        ops.queue_dequeue.name: _dequeue_one,
        ops.queue_dequeue_many.name: _dequeue_many,
        ops.queue_dequeue_up_to.name: _dequeue_up_to,
        ops.queue_size.name: property_of(lambda machine: len(machine.order), jnp.int32),
        ops.queue_is_closed.name: property_of(lambda machine: machine.is_closed, bool),
        ops.queue_close.name: immediate(_close),
    }


def _part(waiter: Waiter, left: int) -> str:
    """Return text for the number of elements that went in, for an enqueue of several."""
    return f", of which {waiter.count - left} went in" if waiter.count > 1 else ""


def _elements(count: int) -> str:
    return f"{count} element{'s' if count != 1 else ''}"


def order_of(settings: QueueSettings) -> ElementOrder:
    """Return a new, empty order for a queue of these settings."""
    match settings.kind:
        case QueueKind.FIFO:
            return ElementOrder()
        case QueueKind.SHUFFLE:
            return ShuffleOrder(settings.seed, settings.min_after_dequeue)
        case QueueKind.PRIORITY:
            return PriorityOrder(lambda element: int(np.asarray(element[0])))


def _cut(flat: Any, shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Return arrays of these shapes, whose elements are in `flat` one after another."""
    ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=int)
    pieces = np.split(np.asarray(flat), ends[:-1]) if shapes else []
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _rows_of(operands: Sequence[Any]) -> list[Element]:
    """Return the elements that an `enqueue_many` of these arrays puts in."""
    wait_until_computed(operands)
    on_host = [np.array(operand) for operand in operands]
    # With the dots a row of a vector is an array of no dimensions, not a NumPy scalar.
    return [tuple(array[row, ...] for array in on_host) for row in range(len(on_host[0]))]


def _batch_of(rows: Sequence[Any], type: ArrayType, count: int) -> Sent:
    """Return `count` rows, padded to the largest size in each dimension; missing rows are zeros.

    They are stacked in host memory, since the elements of a batch may come from several producers.
    """
    arrays = [np.asarray(row) for row in rows]
    shapes = [array.shape for array in arrays] or [tuple(dim or 0 for dim in type.shape)]
    largest = tuple(max(dims) for dims in zip(*shapes, strict=True))
    if len(arrays) == count and all(shape == largest for shape in shapes) and arrays:
        return as_operand(np.stack(arrays))
    batch = np.zeros((count, *largest), type.dtype)
    for number, array in enumerate(arrays):
        position: Any = (number, *(slice(size) for size in array.shape))
        batch[position] = array
    return as_operand(batch)
