"""A queue or an accumulator: a state machine behind a lock, with a callback and a deadline for each waiter.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple, Protocol

from dflow.lowering.queues.channel import Sent
from dflow.lowering.queues.timers import Stoppable, start_timer
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DeadlineExceeded, DflowError, InternalError
from dflow.tracing.ir.resource_op import ResourceOp

LOGGER = logging.getLogger("dflow")

#: Results of a pending operation.
Found = tuple[Any, ...]
OnDone = Callable[[Outcome[Found]], None]
#: Ends a pending operation with an error, unless it has ended.
Cancel = Callable[[BaseException], None]

#: The answers to deliver, by ticket.
Answers = deque[tuple[int, Outcome[Found]]]

#: Results of an op.
Results = tuple[Sent, ...]
OnResults = Callable[[Outcome[Results]], None]
#: Starts an op on a resource, which comes first. `on_results` is called once, from any thread.
Rule = Callable[[Any, ResourceOp, Sequence[Any], OnResults], Cancel]


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


class SavedContents(NamedTuple):
    """The contents of a queue or an accumulator at one moment: `numbers` that JSON can hold, and arrays by name."""

    numbers: Mapping[str, Any]
    arrays: Mapping[str, Any]


class HeldResource(Protocol):
    """A queue or an accumulator, as its store uses it."""

    @property
    def is_recorded(self) -> bool:
        """Whether a step that is done again makes no op on it again. See `applied_steps`."""

    def start(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        """Start an op; `on_results` is called once, from any thread. The returned function ends it with an error."""

    def forget(self, reason: str, remedy: str, error: type[DflowError] | None = None) -> None:
        """Free the contents. Pending operations and later uses get an error with this reason and remedy.

        error  class of these errors; by default that of the resource
        """


class SharedResource(ABC):
    """A queue or an accumulator that this process holds. Every method may be called from any thread.

    A subclass has a state machine, whose methods return commands: each completes a waiter, whose callback is then
    called exactly once.
    """

    kind: ClassVar[str]
    #: The error of each use after `forget`.
    error: ClassVar[type[DflowError]]
    #: How each op runs, by its name.
    rules: ClassVar[Mapping[str, Rule]]
    #: See `HeldResource`.
    is_recorded = True
    #: The state machine. Its methods are called with the lock held.
    machine: Any

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._waiters: dict[int, Waiter] = {}
        #: After `forget`: makes the error of a use at a line of the user.
        self._gone: Callable[[str], DflowError] | None = None

    @abstractmethod
    def _answer(self, command: Any) -> tuple[int, Outcome[Found]]:
        """Return the ticket of the waiter that a command of the machine completes, and its answer. The lock is held."""

    @abstractmethod
    def _too_late(self, ticket: int, waiter: Waiter) -> str:
        """Return the message for an operation that reached its deadline. The lock is held."""

    @abstractmethod
    def _clear(self) -> None:
        """Free the contents. The lock is held."""

    @abstractmethod
    def saved(self) -> SavedContents:
        """Return the contents without what pending operations have yet to add. The arrays must not be changed."""

    @abstractmethod
    def return_to(self, saved: SavedContents) -> None:
        """Set the contents to those of `saved`; pending operations go on with them."""

    def start(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        if op.name not in self.rules:
            raise InternalError(f"no {self.kind} does {op.name!r}")
        return self.rules[op.name](self, op, operands, on_results)

    def forget(self, reason: str, remedy: str, error: type[DflowError] | None = None) -> None:
        kind = error or self.error

        def decide(answers: Answers) -> None:
            self._gone = lambda where: kind(f"{reason}{where}", remedy)
            self._clear()
            for ticket, waiter in list(self._waiters.items()):
                if waiter.answer is None:
                    waiter.answer = self._gone(waiter.where)
                answers.append((ticket, waiter.answer))

        self._answering(decide)

    def _ask(self, waiter: Waiter, ask: Callable[[int], Iterable[Any]]) -> Cancel:
        """Register a pending operation and ask the machine for it; return the function that cancels it."""
        ticket = next(self._tickets)

        def decide(answers: Answers) -> None:
            self._check_there(waiter.where)
            self._waiters[ticket] = waiter
            self._decided(partial(ask, ticket), answers)
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

    def _do(self, act: Callable[[], Iterable[Any]], where: str) -> None:
        """Have the machine act; answer the waiters that this completes."""

        def decide(answers: Answers) -> None:
            self._check_there(where)
            self._decided(act, answers)

        self._answering(decide)

    def with_machine(self, use: Callable[[Any], Any], where: str) -> Any:
        """Return `use(machine)`, with the lock held. Raises the error of the resource after `forget`."""
        with self._lock:
            self._check_there(where)
            return use(self.machine)

    def _check_there(self, where: str) -> None:
        if self._gone is not None:
            raise self._gone(where)

    def _end(self, ticket: int, error: BaseException | None) -> None:
        """End a pending operation with an error, by default that of its deadline."""

        def decide(answers: Answers) -> None:
            waiter = self._waiters.get(ticket)
            if waiter is None:
                return
            if waiter.answer is None:
                answer = error or DeadlineExceeded(self._too_late(ticket, waiter))
                self._decided(partial(self.machine.abandon, ticket), answers)
                waiter.answer = answer
            answers.appendleft((ticket, waiter.answer))

        self._answering(decide)

    def _decided(self, act: Callable[[], Iterable[Any]], answers: Answers) -> None:
        """Have the machine act; record the answers in `answers` and in the waiters. The lock is held."""
        # A single line, so that an interrupt here drops no answer.
        answers.extend(map(self._answer, act()))
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
