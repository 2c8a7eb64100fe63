"""What threads share and may wait for: a state machine behind a lock, with a callback and a deadline for each waiter.

No thread waits here. Whoever brings what a waiter waits for calls its callback, outside the lock, so a callback may
use the resource again; it should be short, for it runs on another's thread. One that raises is logged, and takes
nothing from the other waiters.
"""

from __future__ import annotations

import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dflow.lowering.timers import TIMERS, Timer
from dflow.tracing.errors import DeadlineExceeded, DflowError

LOGGER = logging.getLogger("dflow")

#: What a wait ends with: what was waited for, or the error.
Answer = tuple[Any, ...] | BaseException
OnDone = Callable[[Answer], None]
#: Ends a wait with an error, unless it has ended.
Cancel = Callable[[BaseException], None]

Event = TypeVar("Event")


@dataclass
class Waiter:
    """A callback that is due. `what` the resource is to do for it; `where` is the user's line as messages say it."""

    what: str
    on_done: OnDone
    timeout_s: float
    where: str
    timer: Timer | None = None
    #: Of how many parts it is served one by one.
    count: int = 1


@dataclass(frozen=True)
class Gone:
    """Why the contents were let go of, and what to do."""

    reason: str
    remedy: str


class Shared(ABC, Generic[Event]):
    """A resource of which each waiter, known by its ticket, is told once. Every method may be called by any thread."""

    #: What whoever uses it gets when it is gone.
    error: type[DflowError]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._waiters: dict[int, Waiter] = {}
        self._gone: Gone | None = None

    @abstractmethod
    def _decide(self, event: Event) -> Iterable[tuple[int, Answer]]:
        """What follows from an event: tickets, each with what its wait ends with. The lock is held."""

    @abstractmethod
    def _give_up(self, ticket: int) -> Event:
        """The event that nobody waits with this ticket any more."""

    @abstractmethod
    def _too_late(self, ticket: int, waiter: Waiter) -> str:
        """What to say of a wait that reached its deadline. The lock is held."""

    @abstractmethod
    def _clear(self) -> None:
        """Let go of the contents. The lock is held."""

    def forget(self, reason: str, remedy: str) -> None:
        """Let go of the contents: who uses it from now on, or waits, gets an error that says these two."""
        with self._lock:
            self._gone = Gone(reason, remedy)
            self._clear()
            told: list[tuple[Waiter, Answer]] = [
                (waiter, self._gone_error(self._gone, waiter.where)) for waiter in self._waiters.values()
            ]
            self._waiters.clear()
        _tell(told)

    def _ask(self, waiter: Waiter, event: Callable[[int], Event]) -> Cancel:
        """Wait for what follows from the event of a ticket."""
        ticket = next(self._tickets)
        with self._lock:
            self._check_there(waiter.where)
            self._waiters[ticket] = waiter
            told = self._decided(event(ticket))
            if waiter.timeout_s > 0 and ticket in self._waiters:
                waiter.timer = TIMERS.start(waiter.timeout_s, lambda: self._end(ticket, None))
        _tell(told)
        if waiter.timeout_s <= 0:
            self._end(ticket, None)
        return lambda error: self._end(ticket, error)

    def _do(
        self,
        event: Event,
        where: str,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Do what nobody waits for, between `before` and `after`, and let those go on who wait for it."""
        with self._lock:
            self._check_there(where)
            if before is not None:
                before()
            told = self._decided(event)
            if after is not None:
                after()
        _tell(told)

    def _check_there(self, where: str) -> None:
        if self._gone is not None:
            raise self._gone_error(self._gone, where)

    def _gone_error(self, gone: Gone, where: str) -> DflowError:
        return self.error(f"{gone.reason}{where}\n  {gone.remedy}")

    def _end(self, ticket: int, error: BaseException | None) -> None:
        """End a wait with an error; with that of its deadline when none is given."""
        with self._lock:
            waiter = self._waiters.get(ticket)
            if waiter is None:
                return
            answer = error or DeadlineExceeded(self._too_late(ticket, waiter))
            del self._waiters[ticket]
            told = [(waiter, answer), *self._decided(self._give_up(ticket))]
        _tell(told)

    def _decided(self, event: Event) -> list[tuple[Waiter, Answer]]:
        return [(self._waiters.pop(ticket), answer) for ticket, answer in self._decide(event)]


def _tell(told: Iterable[tuple[Waiter, Answer]]) -> None:
    left = deque(told)
    try:
        while left:
            waiter, answer = left.popleft()
            if waiter.timer is not None:
                waiter.timer.stop()
            try:
                waiter.on_done(answer)
            except Exception:
                LOGGER.exception("what was to %s could not take the answer; other waiters are told", waiter.what)
    finally:
        # An interrupt of this thread is nothing to the others.
        if left:
            _tell(left)


def wait(start: Callable[[OnDone], Cancel]) -> tuple[Any, ...]:
    """Wait for what `start` asks for. Raises its error; interrupted, it ends the wait."""
    answers: list[Answer] = []
    done = threading.Lock()
    done.acquire()

    def on_done(answer: Answer) -> None:
        answers.append(answer)
        done.release()

    cancel = start(on_done)
    try:
        # Most have their answer by now. A lock is lighter than a Future, which makes one and more.
        if not answers:
            done.acquire()
    except BaseException as error:
        cancel(error)
        raise
    (answer,) = answers
    if isinstance(answer, BaseException):
        raise answer
    return answer
