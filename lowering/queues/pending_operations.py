"""A resource shared by threads: a state machine behind a lock, with a callback and a deadline for each waiter.

A waiter is a pending operation, not a blocked thread. The thread whose operation completes it calls its callback,
outside the lock, so a callback may use the resource again. Callbacks should be short, since they run on the threads of
other callers. An exception in a callback is logged and does not affect the other waiters.

An interrupt may come between any two lines of the completing thread. So a waiter stays registered under its ticket
until its callback is called, and an interrupted thread still delivers the answers that were decided. Waiters whose
answers were not decided end at their deadlines.
"""

from __future__ import annotations

import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from dflow.lowering.queues.timers import Stoppable, start_timer
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DeadlineExceeded, DflowError

LOGGER = logging.getLogger("dflow")

#: Results of a pending operation.
Found = tuple[Any, ...]
OnDone = Callable[[Outcome[Found]], None]
#: Ends a pending operation with an error, unless it has ended.
Cancel = Callable[[BaseException], None]

#: The answers to deliver, by ticket.
Answers = deque[tuple[int, Outcome[Found]]]

Event = TypeVar("Event")


@dataclass
class Waiter:
    """A pending operation. `what` names the operation in messages; `where` is the user's line, as messages show it."""

    what: str
    on_done: OnDone
    timeout_s: float
    where: str
    timer: Stoppable | None = None
    #: Number of parts of the operation, which the resource completes one by one.
    count: int = 1
    #: The answer, once it is decided.
    answer: Outcome[Found] | None = None


@dataclass(frozen=True)
class Gone:
    """Why the contents were freed, and the remedy."""

    reason: str
    remedy: str


class Shared(ABC, Generic[Event]):
    """A resource that calls each waiter's callback exactly once. Every method may be called from any thread."""

    #: The error of each use after `forget`.
    error: type[DflowError]
    #: The state machine. Its methods are called with the lock held.
    machine: Any

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._waiters: dict[int, Waiter] = {}
        self._gone: Gone | None = None

    @abstractmethod
    def _decide(self, event: Event) -> Iterable[tuple[int, Outcome[Found]]]:
        """Apply an event; return the tickets of the operations that it completes, with answers. The lock is held."""

    @abstractmethod
    def _give_up(self, ticket: int) -> Event:
        """Return the event that abandons the operation with this ticket."""

    @abstractmethod
    def _too_late(self, ticket: int, waiter: Waiter) -> str:
        """Return the message for an operation that reached its deadline. The lock is held."""

    @abstractmethod
    def _clear(self) -> None:
        """Free the contents. The lock is held."""

    def forget(self, reason: str, remedy: str) -> None:
        """Free the contents. Pending operations and later uses get an error with this reason and remedy."""

        def decide(answers: Answers) -> None:
            self._gone = Gone(reason, remedy)
            self._clear()
            for ticket, waiter in list(self._waiters.items()):
                if waiter.answer is None:
                    waiter.answer = self._gone_error(self._gone, waiter.where)
                answers.append((ticket, waiter.answer))

        self._answering(decide)

    def _ask(self, waiter: Waiter, event: Callable[[int], Event]) -> Cancel:
        """Register a pending operation and apply its event; return the function that cancels it."""
        ticket = next(self._tickets)

        def decide(answers: Answers) -> None:
            self._check_there(waiter.where)
            self._waiters[ticket] = waiter
            self._decided(event(ticket), answers)
            if waiter.timeout_s > 0 and waiter.answer is None:
                waiter.timer = start_timer(waiter.timeout_s, lambda: self._end(ticket, None))

        try:
            self._answering(decide)
            if waiter.timeout_s <= 0:
                self._end(ticket, None)
        except BaseException as error:
            # The caller does not receive the function that cancels it.
            self._end(ticket, error)
            raise
        return lambda error: self._end(ticket, error)

    def _do(
        self,
        event: Event,
        where: str,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Apply an event that no caller waits for, between `before` and `after`; answer the waiters it completes."""

        def decide(answers: Answers) -> None:
            self._check_there(where)
            if before is not None:
                before()
            self._decided(event, answers)
            if after is not None:
                after()

        self._answering(decide)

    def inspected(self, read: Callable[[Any], Any], where: str) -> Any:
        """Return `read(machine)`, as it is now. Raises the resource's error after `forget`."""
        with self._lock:
            self._check_there(where)
            return read(self.machine)

    def _check_there(self, where: str) -> None:
        if self._gone is not None:
            raise self._gone_error(self._gone, where)

    def _gone_error(self, gone: Gone, where: str) -> DflowError:
        return self.error(
            f"{gone.reason}{where}",
            gone.remedy,
        )

    def _end(self, ticket: int, error: BaseException | None) -> None:
        """End a pending operation with an error, by default that of its deadline."""

        def decide(answers: Answers) -> None:
            waiter = self._waiters.get(ticket)
            if waiter is None:
                return
            if waiter.answer is None:
                answer = error or DeadlineExceeded(self._too_late(ticket, waiter))
                self._decided(self._give_up(ticket), answers)
                waiter.answer = answer
            answers.appendleft((ticket, waiter.answer))

        self._answering(decide)

    def _decided(self, event: Event, answers: Answers) -> None:
        """Apply an event; record the answers, in `answers` and in the waiters. The lock is held."""
        # A single call, so that an interrupt here drops no answer.
        answers.extend(self._decide(event))
        for ticket, answer in answers:
            self._waiters[ticket].answer = answer

    def _answering(self, decide: Callable[[Answers], None]) -> None:
        """Call `decide` with the lock; then deliver the answers that it added, also after an interrupt."""
        answers: Answers = deque()
        try:
            with self._lock:
                decide(answers)
            self._deliver(answers)
        finally:
            # An interrupt of this thread must not keep other threads waiting.
            self._deliver(answers)

    def _deliver(self, answers: Answers) -> None:
        """Call the callbacks of the answers and empty the deque. The lock is not held."""
        try:
            while answers:
                self._deliver_one(*answers[0])
                answers.popleft()
        finally:
            if answers:
                self._deliver(answers)

    def _deliver_one(self, ticket: int, answer: Outcome[Found]) -> None:
        waiter = self._waiters.get(ticket)
        if waiter is None:
            return
        if waiter.timer is not None:
            waiter.timer.stop()
        try:
            # The thread that removes the ticket calls the callback, so it is called once.
            self._waiters.pop(ticket, _ANSWERED).on_done(answer)
        except Exception:
            LOGGER.exception("the callback of an operation to %s failed; other waiters get answers", waiter.what)


#: Stands for a waiter whose callback another thread calls.
_ANSWERED = Waiter("nothing", lambda answer: None, 0.0, "")


def wait(start: Callable[[OnDone], Cancel]) -> tuple[Any, ...]:
    """Start an operation and wait for its results. Raises its error; an interrupt cancels the operation."""
    # Cheaper than a Future, and `put` is atomic: an interrupt of the thread that answers cannot leave it half done.
    done: SimpleQueue[Outcome[Found]] = SimpleQueue()
    cancel: Cancel | None = None
    try:
        cancel = start(done.put)
        answer = done.get()
    except BaseException as error:
        if cancel is not None:
            cancel(error)
        raise
    if isinstance(answer, BaseException):
        raise answer
    return answer
