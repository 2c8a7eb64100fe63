"""What a queue does, decided without I/O, clock or threads.

Events in (an enqueue or a dequeue was asked for, the queue was closed, a wait has ended), commands out (a waiter is
served, or fails). The semantics are TensorFlow's. Invariants:

- waiters of one kind are served in the order they asked; the first of them holds up those behind it;
- an element is in the queue, still with the enqueue that brings it, or was given to one dequeue, never two of these;
- a dequeue of several takes them at once, or nothing; while one of more than the capacity waits, that many fit;
- every ticket gets exactly one command;
- a closed queue takes no new enqueue, though those that waited go in unless they are cancelled; it holds nothing back,
  and a dequeue that cannot be served fails. By the room that a dequeue makes, whoever can still bring an element has
  brought it before that is decided.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

Element = Any


@dataclass(frozen=True)
class EnqueueAsked:
    """Someone wants to put elements in; what has gone in stays in, should the wait for the rest end early."""

    ticket: int
    elements: tuple[Element, ...]


@dataclass(frozen=True)
class DequeueAsked:
    """Someone wants `count` elements; `or_fewer`, if the queue is closed and holds some."""

    ticket: int
    count: int
    or_fewer: bool = False


@dataclass(frozen=True)
class CloseAsked:
    """No more enqueues; with `cancel_pending`, those that wait fail."""

    cancel_pending: bool = False


@dataclass(frozen=True)
class WaitEnded:
    """Nobody wants the ticket served any more: its deadline has passed, or it was cancelled."""

    ticket: int


Event = EnqueueAsked | DequeueAsked | CloseAsked | WaitEnded


class Why(Enum):
    """Why a waiter fails."""

    CLOSED = "closed"
    ENDED = "ended"


@dataclass(frozen=True)
class Serve:
    """The waiter has what it asked for: `elements` for a dequeue, none for an enqueue."""

    ticket: int
    elements: tuple[Element, ...] = ()


@dataclass(frozen=True)
class Fail:
    """The waiter gets nothing."""

    ticket: int
    why: Why
    #: How many elements of an enqueue are not in, for messages alone.
    left: int = field(default=0, compare=False)


Command = Serve | Fail


class Order(Protocol):
    """Which element goes next. `held_back` stay in the queue until it is closed."""

    held_back: int

    def __len__(self) -> int:
        """How many elements there are."""
        ...

    def push(self, element: Element) -> None:
        """Put one in."""
        ...

    def pop(self) -> Element:
        """Take the next."""
        ...

    def contents(self) -> list[Element]:
        """The elements, for inspection; first in, first."""
        ...


class FifoOrder:
    """First in, first out."""

    held_back = 0

    def __init__(self) -> None:
        self._elements: deque[Element] = deque()

    def __len__(self) -> int:
        return len(self._elements)

    def push(self, element: Element) -> None:
        self._elements.append(element)

    def pop(self) -> Element:
        return self._elements.popleft()

    def contents(self) -> list[Element]:
        return list(self._elements)


class ShuffleOrder:
    """A random one, by `seed`: the same seed and the same pushes and pops give the same elements."""

    def __init__(self, seed: int, min_after_dequeue: int) -> None:
        self.held_back = min_after_dequeue
        self._random = random.Random(seed)
        self._elements: list[Element] = []

    def __len__(self) -> int:
        return len(self._elements)

    def push(self, element: Element) -> None:
        self._elements.append(element)

    def pop(self) -> Element:
        # The last one takes its place, so that a pop costs the same however long the queue is.
        place = self._random.randrange(len(self._elements))
        last = self._elements.pop()
        if place == len(self._elements):
            return last
        taken, self._elements[place] = self._elements[place], last
        return taken

    def contents(self) -> list[Element]:
        return list(self._elements)


class PriorityOrder:
    """The one of the lowest priority; of equal ones, the first in."""

    held_back = 0

    def __init__(self, priority_of: Callable[[Element], int]) -> None:
        self._priority_of = priority_of
        self._serials = itertools.count()
        self._heap: list[tuple[int, int, Element]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, element: Element) -> None:
        heapq.heappush(self._heap, (self._priority_of(element), next(self._serials), element))

    def pop(self) -> Element:
        return heapq.heappop(self._heap)[2]

    def contents(self) -> list[Element]:
        return [element for _, _, element in sorted(self._heap, key=lambda entry: entry[1])]


@dataclass
class _Enqueuing:
    ticket: int
    rest: deque[Element]


class QueueMachine:
    """One queue of at most `capacity` elements."""

    def __init__(self, capacity: int, order: Order) -> None:
        self.capacity = capacity
        self.order = order
        self.is_closed = False
        self._enqueuing: deque[_Enqueuing] = deque()
        self._dequeuing: deque[DequeueAsked] = deque()

    def handle(self, event: Event) -> list[Command]:
        """What follows from an event."""
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
        """How many elements of an enqueue that waits are not in."""
        return sum(len(waiter.rest) for waiter in self._enqueuing if waiter.ticket == ticket)

    def _fail_enqueues(self) -> Iterable[Command]:
        failed = [Fail(waiter.ticket, Why.CLOSED, len(waiter.rest)) for waiter in self._enqueuing]
        self._enqueuing.clear()
        return failed

    def _drop(self, ticket: int) -> list[Command]:
        waiting = len(self._enqueuing) + len(self._dequeuing)
        self._enqueuing = deque(waiter for waiter in self._enqueuing if waiter.ticket != ticket)
        self._dequeuing = deque(waiter for waiter in self._dequeuing if waiter.ticket != ticket)
        is_dropped = len(self._enqueuing) + len(self._dequeuing) < waiting
        return [Fail(ticket, Why.ENDED)] if is_dropped else []

    def _advance(self) -> list[Command]:
        """Let in and give out until the first waiter of either kind has to wait."""
        commands: list[Command] = []
        while (command := self._let_in() or self._give_out()) is not None:
            commands.append(command)
        return commands

    def _let_in(self) -> Command | None:
        if not self._enqueuing:
            return None
        first = self._enqueuing[0]
        while first.rest and len(self.order) < self._room():
            self.order.push(first.rest.popleft())
        return Serve(self._enqueuing.popleft().ticket) if not first.rest else None

    def _room(self) -> int:
        wanted = self._dequeuing[0].count + self.order.held_back if self._dequeuing else 0
        return max(self.capacity, wanted)

    def _give_out(self) -> Command | None:
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
