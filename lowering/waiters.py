"""What threads share and may wait for: a state machine behind a lock, with a callback and a deadline for each waiter.

No thread waits here. Whoever brings what a waiter waits for calls its callback, outside the lock, so a callback may
use the resource again; it should be short, for it runs on another's thread. One that raises is logged, and takes
nothing from the other waiters.

An interrupt may come between any two lines of whoever brings it. So a waiter is known by its ticket until it is told,
and who is interrupted tells nonetheless what was decided; of what was not, the deadlines tell.
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

from dflow.lowering.timers import Stoppable, start_timer
from dflow.tracing.errors import DeadlineExceeded, DflowError

LOGGER = logging.getLogger("dflow")

#: What a wait ends with: what was waited for, or the error.
Answer = tuple[Any, ...] | BaseException
OnDone = Callable[[Answer], None]
#: Ends a wait with an error, unless it has ended.
Cancel = Callable[[BaseException], None]

#: Who is to be told, by ticket, and what.
Told = deque[tuple[int, Answer]]

Event = TypeVar("Event")


@dataclass
class Waiter:
    """A callback that is due. `what` the resource is to do for it; `where` is the user's line as messages say it."""

    what: str
    on_done: OnDone
    timeout_s: float
    where: str
    timer: Stoppable | None = None
    #: Of how many parts it is served one by one.
    count: int = 1
    #: What its wait ends with, once that is decided.
    answer: Answer | None = None


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
        told: Told = deque()
        try:
            with self._lock:
                self._gone = Gone(reason, remedy)
                self._clear()
                for ticket, waiter in list(self._waiters.items()):
                    if waiter.answer is None:
                        waiter.answer = self._gone_error(self._gone, waiter.where)
                    told.append((ticket, waiter.answer))
            self._tell(told)
        finally:
            self._tell(told)

    def _ask(self, waiter: Waiter, event: Callable[[int], Event]) -> Cancel:
        """Wait for what follows from the event of a ticket."""
        ticket = next(self._tickets)
        told: Told = deque()
        try:
            with self._lock:
                self._check_there(waiter.where)
                self._waiters[ticket] = waiter
                self._decided(event(ticket), told)
                if waiter.timeout_s > 0 and waiter.answer is None:
                    waiter.timer = start_timer(waiter.timeout_s, lambda: self._end(ticket, None))
            self._tell(told)
            if waiter.timeout_s <= 0:
                self._end(ticket, None)
        except BaseException as error:
            # Nobody gets to cancel it.
            self._end(ticket, error)
            raise
        finally:
            self._tell(told)
        return lambda error: self._end(ticket, error)

    def _do(
        self,
        event: Event,
        where: str,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Do what nobody waits for, between `before` and `after`, and let those go on who wait for it."""
        told: Told = deque()
        try:
            with self._lock:
                self._check_there(where)
                if before is not None:
                    before()
                self._decided(event, told)
                if after is not None:
                    after()
            self._tell(told)
        finally:
            self._tell(told)

    def _check_there(self, where: str) -> None:
        if self._gone is not None:
            raise self._gone_error(self._gone, where)

    def _gone_error(self, gone: Gone, where: str) -> DflowError:
        return self.error(f"{gone.reason}{where}\n  {gone.remedy}")

    def _end(self, ticket: int, error: BaseException | None) -> None:
        """End a wait with an error; with that of its deadline when none is given."""
        told: Told = deque()
        try:
            with self._lock:
                waiter = self._waiters.get(ticket)
                if waiter is None:
                    return
                if waiter.answer is None:
                    answer = error or DeadlineExceeded(self._too_late(ticket, waiter))
                    self._decided(self._give_up(ticket), told)
                    waiter.answer = answer
                told.appendleft((ticket, waiter.answer))
            self._tell(told)
        finally:
            self._tell(told)

    def _decided(self, event: Event, told: Told) -> None:
        """Add to `told` what follows from an event, and note it on the waiters. The lock is held."""
        # In one step, so that an interrupt here drops no decision.
        told.extend(self._decide(event))
        for ticket, answer in told:
            self._waiters[ticket].answer = answer

    def _tell(self, told: Told) -> None:
        """Tell what was decided, and empty `told`; again, when an interrupt came before. The lock is not held."""
        try:
            while told:
                self._tell_one(*told[0])
                told.popleft()
        finally:
            # An interrupt of this thread is nothing to the others.
            if told:
                self._tell(told)

    def _tell_one(self, ticket: int, answer: Answer) -> None:
        waiter = self._waiters.get(ticket)
        if waiter is None:
            return
        if waiter.timer is not None:
            waiter.timer.stop()
        try:
            # Whoever takes the ticket tells, so that it is told once.
            self._waiters.pop(ticket, _TOLD).on_done(answer)
        except Exception:
            LOGGER.exception("what was to %s could not take the answer; other waiters are told", waiter.what)


#: In the place of a waiter that another thread tells.
_TOLD = Waiter("nothing", lambda answer: None, 0.0, "")


def wait(start: Callable[[OnDone], Cancel]) -> tuple[Any, ...]:
    """Wait for what `start` asks for. Raises its error; interrupted, it ends the wait."""
    # Lighter than a Future, and in one step: an interrupt of who tells cannot leave it half done.
    done: SimpleQueue[Answer] = SimpleQueue()
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
