"""The producing side of a queue, for a thread that must not keep the queue alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflow.lowering.queues.pending_operations import Cancel, OnResults
from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.values.index_set import IndexSet
from dflow.tracing.ir import ops
from dflow.tracing.ir.resource_op import FedElement, ResourceOp
from dflow.tracing.source import at, raised_at

#: Timeout of an enqueue by a producer, in s: it waits for room until it is cancelled.
FOREVER_S = 1e8


class QueueProducer(Protocol):
    """Puts elements into one queue; for any thread. Raises QueueError once the contents of the queue are freed."""

    def enqueue(self, number: int, element: Sequence[Any], on_results: OnResults) -> Cancel:
        """Start to put an element in, which waits for room; `on_results` is called once, from any thread.

        `number` counts the elements of this producer from 0; one that is put in again, since its answer was lost, has
        the number of before, and is in the queue once. The returned function ends the wait with an error.
        """

    def fed(self) -> IndexSet:
        """Return the numbers of the elements that are or were in the queue, put in by a producer of the same name."""

    def forget(self) -> None:
        """Forget which elements were put in, at the end of a producer without a name."""

    def close(self) -> None:
        """Refuse later enqueues."""

    def fail(self, failure: BaseException) -> None:
        """Close the queue because of `failure`: a dequeue of more elements than it holds raises FeedError."""

    def is_recovered(self, error: BaseException, failures: int) -> bool:
        """Return whether an enqueue that failed with `error` can be tried again, after the queue was lost or restored.

        It may wait until the queue is restored. `failures` is the number of failures in a row.
        """


@dataclass(frozen=True)
class HeldQueueProducer:
    """The producer of a queue in this process; `where` is the user's line that feeds it, `name` None for no name."""

    held: HeldQueue
    where: str
    name: str | None

    def enqueue(self, number: int, element: Sequence[Any], on_results: OnResults) -> Cancel:
        """See `QueueProducer`; no answer is lost in a process, so only elements with a name are counted."""
        of = FedElement(self.name, number) if self.name is not None else None
        return self.held.start(enqueue_op(self.where, of), element, on_results)

    def fed(self) -> IndexSet:
        return self.held.fed(self.name) if self.name is not None else IndexSet()

    def forget(self) -> None:
        """See `QueueProducer`: nothing is recorded without a name."""

    def close(self) -> None:
        self.held.close()

    def fail(self, failure: BaseException) -> None:
        """See `QueueProducer`; `failure` becomes the cause of each FeedError."""
        self.held.fail(failure_text(failure), self.where, failure)

    def is_recovered(self, error: BaseException, failures: int) -> bool:
        """See `QueueProducer`: the queue lives as long as this process."""
        return False


def enqueue_op(where: str, of: FedElement | None = None) -> ResourceOp:
    """Return an enqueue of one element that waits for room until it is cancelled; `where` is the user's line."""
    return ResourceOp(ops.queue_enqueue.name, timeout_s=FOREVER_S, line=where, of=of)


def close_op(where: str) -> ResourceOp:
    """Return the op that closes a queue."""
    return ResourceOp(ops.queue_close.name, line=where)


def failure_text(failure: BaseException) -> str:
    """Return the class, the text and the line of an error."""
    return f"{type(failure).__name__}: {failure}{at(raised_at(failure))}"
