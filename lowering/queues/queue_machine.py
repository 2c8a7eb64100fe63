"""The state machine of a queue, without I/O, clock or threads.

Events go in (an enqueue or a dequeue was requested, the queue was closed, a wait has ended), commands come out (a
waiter is served, or fails). A waiter is a pending enqueue or dequeue. The semantics are TensorFlow's. Invariants:

- waiters of one kind are served in the order of their requests; the first of them holds up those behind it;
- an element is in the queue, still with its enqueue, or was given to one dequeue, never two of these;
- a dequeue of several elements takes all of them together, or none; while the first pending dequeue wants more than the
  capacity, the queue may hold the number that it wants;
- every ticket gets exactly one command;
- a closed queue refuses new enqueues, but accepts pending ones unless they are cancelled; it holds nothing back, and a
  dequeue that cannot be served fails. Before that is decided, pending enqueues fill the free room.
"""

from __future__ import annotations

import heapq
import itertools
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Element = Any


@dataclass(frozen=True)
class EnqueueAsked:
    """A request to put elements in. Those already in stay in, if the wait for the rest ends early."""

    ticket: int
    elements: tuple[Element, ...]


@dataclass(frozen=True)
class DequeueAsked:
    """A request for `count` elements; with `or_fewer`, for fewer if the queue is closed and not empty."""

    ticket: int
    count: int
    or_fewer: bool = False


@dataclass(frozen=True)
class CloseAsked:
    """A request to close the queue: enqueues are refused; with `cancel_pending`, pending ones fail."""

    cancel_pending: bool = False


@dataclass(frozen=True)
class WaitEnded:
    """The operation with this ticket was abandoned: its deadline has passed, or it was cancelled."""

    ticket: int


QueueEvent = EnqueueAsked | DequeueAsked | CloseAsked | WaitEnded


class Why(Enum):
    """The reason why a waiter fails."""

    CLOSED = "closed"
    ENDED = "ended"


@dataclass(frozen=True)
class Serve:
    """The waiter is done: a dequeue gets `elements`, an enqueue none."""

    ticket: int
    elements: tuple[Element, ...] = ()


@dataclass(frozen=True)
class Fail:
    """The waiter fails, without elements."""

    ticket: int
    why: Why
    #: Number of elements of an enqueue that are not in, for messages alone.
    left: int = field(default=0, compare=False)


QueueCommand = Serve | Fail


class ElementOrder(ABC):
    """The elements of a queue, in the order of their dequeues. `held_back` of them stay until it is closed."""

    held_back = 0

    def __init__(self) -> None:
        self._elements: Any = []

    def __len__(self) -> int:
        return len(self._elements)

    def push(self, element: Element) -> None:
        """Put an element in."""
        self._elements.append(element)

    @abstractmethod
    def pop(self) -> Element:
        """Remove and return the next element."""

    def contents(self) -> list[Element]:
        """Return the elements, for inspection, without changing them."""
        return list(self._elements)


class FifoOrder(ElementOrder):
    """First in, first out."""

    def __init__(self) -> None:
        self._elements: deque[Element] = deque()

    def pop(self) -> Element:
        return self._elements.popleft()


class ShuffleOrder(ElementOrder):
    """A random element next. The same `seed` with the same pushes and pops gives the same elements."""

    def __init__(self, seed: int, min_after_dequeue: int) -> None:
        super().__init__()
        self.held_back = min_after_dequeue
        self._random = random.Random(seed)

    def pop(self) -> Element:
        # The last element moves to the free index, so that a pop takes constant time.
        place = self._random.randrange(len(self._elements))
        last = self._elements.pop()
        if place == len(self._elements):
            return last
        taken, self._elements[place] = self._elements[place], last
        return taken


class PriorityOrder(ElementOrder):
    """The element with the lowest priority number next; of equal ones, the first that was put in."""

    def __init__(self, priority_of: Callable[[Element], int]) -> None:
        super().__init__()
        self._priority_of = priority_of
        self._serials = itertools.count()

    def push(self, element: Element) -> None:
        heapq.heappush(self._elements, (self._priority_of(element), next(self._serials), element))

    def pop(self) -> Element:
        return heapq.heappop(self._elements)[2]

    def contents(self) -> list[Element]:
        return [element for _, _, element in sorted(self._elements, key=lambda entry: entry[1])]


@dataclass
class _Enqueuing:
    ticket: int
    rest: deque[Element]


class QueueMachine:
    """One queue of at most `capacity` elements."""

    def __init__(self, capacity: int, order: ElementOrder) -> None:
        self.capacity = capacity
        self.order = order
        self.is_closed = False
        self._enqueuing: deque[_Enqueuing] = deque()
        self._dequeuing: deque[DequeueAsked] = deque()

    def handle(self, event: QueueEvent) -> list[QueueCommand]:
        """Apply an event and return the commands to execute, in order."""
        match event:
            case EnqueueAsked(ticket, elements) if self.is_closed:
                return [Fail(ticket, Why.CLOSED, len(elements))]
            case EnqueueAsked(ticket, elements):
                self._enqueuing.append(_Enqueuing(ticket, deque(elements)))
                return self._advance()
            case DequeueAsked():
                self._dequeuing.append(event)
                return self._advance()
            case CloseAsked(cancel_pending):
                self.is_closed = True
                return [*(self._fail_enqueues() if cancel_pending else ()), *self._advance()]
            case WaitEnded(ticket):
                return [*self._drop(ticket), *self._advance()]

    def left(self, ticket: int) -> int:
        """Return the number of elements of a pending enqueue that are not in."""
        return sum(len(waiter.rest) for waiter in self._enqueuing if waiter.ticket == ticket)

    def _fail_enqueues(self) -> Iterable[QueueCommand]:
        failed = [Fail(waiter.ticket, Why.CLOSED, len(waiter.rest)) for waiter in self._enqueuing]
        self._enqueuing.clear()
        return failed

    def _drop(self, ticket: int) -> list[QueueCommand]:
        waiting = len(self._enqueuing) + len(self._dequeuing)
        self._enqueuing = deque(waiter for waiter in self._enqueuing if waiter.ticket != ticket)
        self._dequeuing = deque(waiter for waiter in self._dequeuing if waiter.ticket != ticket)
        is_dropped = len(self._enqueuing) + len(self._dequeuing) < waiting
        return [Fail(ticket, Why.ENDED)] if is_dropped else []

    def _advance(self) -> list[QueueCommand]:
        """Serve waiters until the first one of each kind has to wait."""
        commands: list[QueueCommand] = []
        while (command := self._let_in() or self._give_out()) is not None:
            commands.append(command)
        return commands

    def _let_in(self) -> QueueCommand | None:
        if not self._enqueuing:
            return None
        first = self._enqueuing[0]
        while first.rest and len(self.order) < self._room():
            self.order.push(first.rest.popleft())
        return Serve(self._enqueuing.popleft().ticket) if not first.rest else None

    def _room(self) -> int:
        wanted = self._dequeuing[0].count + self.order.held_back if self._dequeuing else 0
        return max(self.capacity, wanted)

    def _give_out(self) -> QueueCommand | None:
        if not self._dequeuing:
            return None
        first = self._dequeuing[0]
        available = max(0, len(self.order) - (0 if self.is_closed else self.order.held_back))
        count = min(first.count, available) if first.or_fewer and self.is_closed and available else first.count
        if count > available and not self.is_closed:
            return None
        self._dequeuing.popleft()
        if count > available:
            return Fail(first.ticket, Why.CLOSED)
        return Serve(first.ticket, tuple(self.order.pop() for _ in range(count)))
