"""Queues that threads share: a `QueueMachine` behind a lock, with a callback and a deadline for each waiter.

No thread waits here. Whoever brings what a waiter waits for calls its callback, outside the lock, so a callback may
use the queue again; it should be short, for it runs on another's thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from dflow.lowering.queue_machine import (
    CloseAsked,
    DequeueAsked,
    Element,
    EnqueueAsked,
    Event,
    Fail,
    FifoOrder,
    Order,
    PriorityOrder,
    QueueMachine,
    Serve,
    ShuffleOrder,
    WaitEnded,
    Why,
)
from dflow.lowering.timers import TIMERS, Timer
from dflow.tracing.errors import DeadlineExceeded, QueueClosed
from dflow.tracing.queue_settings import QueueKind, QueueSettings

#: What a wait ends with: the elements (none for an enqueue), or the error.
Answer = tuple[Element, ...] | BaseException
OnDone = Callable[[Answer], None]
#: Ends a wait with an error, unless it has ended.
Cancel = Callable[[BaseException], None]


@dataclass
class _Waiter:
    """A callback that is due. `what` the queue is to do for it; `where` is the user's line as messages say it."""

    what: str
    on_done: OnDone
    timeout_s: float
    where: str
    timer: Timer | None = None
    error: BaseException | None = None


class SharedQueue:
    """A queue of elements, each a tuple of arrays. Every method may be called from any thread."""

    def __init__(self, name: str, settings: QueueSettings) -> None:
        self.name = name
        self._machine = QueueMachine(settings.capacity, order_of(settings))
        self._kind = settings.kind
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._waiters: dict[int, _Waiter] = {}

    def enqueue(self, elements: Sequence[Element], on_done: OnDone, timeout_s: float, where: str = "") -> Cancel:
        """Put the elements in, in order; `on_done` is called once, from any thread, when all are in or with an error.

        Errors: QueueClosed; DeadlineExceeded after `timeout_s`; what the wait was cancelled with. Elements that were
        put in before an error stay in.
        """
        ticket = next(self._tickets)
        if self._kind is QueueKind.PRIORITY:
            # Computed here, so that nobody waits for it under the lock.
            elements = [(np.asarray(element[0]), *element[1:]) for element in elements]
        waiter = _Waiter(f"take {_elements(len(elements))}", on_done, timeout_s, where)
        return self._ask(ticket, waiter, EnqueueAsked(ticket, tuple(elements)))

    def dequeue(
        self, count: int, on_done: OnDone, timeout_s: float, where: str = "", *, or_fewer: bool = False
    ) -> Cancel:
        """Take `count` elements; as `enqueue`. With `or_fewer`, what is left of a closed queue, if anything is."""
        ticket = next(self._tickets)
        waiter = _Waiter(f"give {_elements(count)}", on_done, timeout_s, where)
        return self._ask(ticket, waiter, DequeueAsked(ticket, count, or_fewer))

    def close(self, *, cancel_pending: bool = False) -> None:
        """Take nothing more; with `cancel_pending`, the enqueues that wait fail too."""
        self._handle(CloseAsked(cancel_pending))

    def size(self) -> int:
        """How many elements it holds now."""
        with self._lock:
            return len(self._machine.order)

    def contents(self) -> list[Element]:
        """The elements, for inspection."""
        with self._lock:
            return self._machine.order.contents()

    def _ask(self, ticket: int, waiter: _Waiter, event: Event) -> Cancel:
        with self._lock:
            self._waiters[ticket] = waiter
        self._handle(event)
        if waiter.timeout_s <= 0:
            self._end(ticket, None)
        else:
            with self._lock:
                if ticket in self._waiters:
                    waiter.timer = TIMERS.start(waiter.timeout_s, lambda: self._end(ticket, None))
        return lambda error: self._end(ticket, error)

    def _end(self, ticket: int, error: BaseException | None) -> None:
        """End a wait with an error; with that of its deadline when none is given."""
        with self._lock:
            waiter = self._waiters.get(ticket)
            if waiter is None:
                return
            fact = f"queue {self.name!r} could not {waiter.what} within {waiter.timeout_s:g} s; {self._held()}"
            waiter.error = error or DeadlineExceeded(fact + waiter.where)
        self._handle(WaitEnded(ticket))

    def _handle(self, event: Event) -> None:
        with self._lock:
            answers = [self._answered(command) for command in self._machine.handle(event)]
        for waiter, answer in answers:
            if waiter.timer is not None:
                waiter.timer.stop()
            waiter.on_done(answer)

    def _answered(self, command: Serve | Fail) -> tuple[_Waiter, Answer]:
        waiter = self._waiters.pop(command.ticket)
        match command:
            case Serve(_, elements):
                return waiter, elements
            case Fail(_, Why.CLOSED):
                fact = f"queue {self.name!r} is closed and cannot {waiter.what}; {self._held()}{waiter.where}"
                return waiter, QueueClosed(fact)
            case Fail():
                assert waiter.error is not None
                return waiter, waiter.error

    def _held(self) -> str:
        return f"it holds {len(self._machine.order)} of at most {self._machine.capacity}"


def _elements(count: int) -> str:
    return f"{count} element{'s' if count != 1 else ''}"


def order_of(settings: QueueSettings) -> Order:
    """The order that a queue of these settings keeps."""
    match settings.kind:
        case QueueKind.FIFO:
            return FifoOrder()
        case QueueKind.SHUFFLE:
            return ShuffleOrder(settings.seed, settings.min_after_dequeue)
        case QueueKind.PRIORITY:
            return PriorityOrder(lambda element: int(np.asarray(element[0])))


def wait(start: Callable[[OnDone], Cancel]) -> tuple[Element, ...]:
    """Wait for what `start` asks of a queue. Raises its error; interrupted, the wait on the queue ends too."""
    done: Future[Answer] = Future()
    cancel = start(done.set_result)
    try:
        answer = done.result()
    except BaseException as error:
        cancel(error)
        raise
    if isinstance(answer, BaseException):
        raise answer
    return answer
