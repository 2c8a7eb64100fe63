"""The state machine of a queue, without I/O, clock or threads.

Each method returns commands: which waiters are served, and which fail. A waiter is a pending enqueue or dequeue, known
by its ticket. The semantics are TensorFlow's. Invariants:

- waiters of one kind are served in the order of their requests; the first of them holds up those behind it;
- an element is in the queue, still with its enqueue, or was given to one dequeue, never two of these; an element of a
  feed is put in once, however often it is given, and `fed` has exactly the elements of feeds that were put in;
- a dequeue of several elements takes all of them together, or none; while the first pending dequeue wants more than the
  capacity, the queue may hold the number that it wants;
- every ticket gets exactly one command, or none once it is abandoned;
- a closed queue refuses new enqueues, but accepts pending ones unless they are cancelled; it holds nothing back, and a
  dequeue that cannot be served fails. Before that is decided, pending enqueues fill the free room.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dflow.lowering.values.index_set import IndexSet
from dflow.tracing.ir.resource_op import FedElement

Element = Any


@dataclass(frozen=True)
class Serve:
    """The waiter is done: a dequeue gets `elements`, an enqueue none."""

    ticket: int
    elements: tuple[Element, ...] = ()


@dataclass(frozen=True)
class Fail:
    """The queue is closed, and the waiter fails without elements."""

    ticket: int
    #: Number of elements of an enqueue that are not in, for messages alone.
    left: int = field(default=0, compare=False)


QueueCommand = Serve | Fail


class ElementOrder:
    """The elements of a queue, in the order of their dequeues: first in, first out, unless a subclass has another one.

    `held_back` of them stay until it is closed.
    """

    held_back = 0
    #: Decides the order, unless the pushes do.
    random: random.Random | None = None

    def __init__(self) -> None:
        self._elements: Any = deque()

    def __len__(self) -> int:
        return len(self._elements)

    def push(self, element: Element) -> None:
        """Put an element in."""
        self._elements.append(element)

    def pop(self) -> Element:
        """Remove and return the next element."""
        return self._elements.popleft()

    def contents(self) -> list[Element]:
        """Return the elements without changing them. Pushed into an empty order, they come out as they would here."""
        return list(self._elements)


class ShuffleOrder(ElementOrder):
    """A random element next. The same `seed` with the same pushes and pops gives the same elements."""

    def __init__(self, seed: int, min_after_dequeue: int) -> None:
        self._elements = []
        self.held_back = min_after_dequeue
        self.random = self._random = random.Random(seed)

    def pop(self) -> Element:
        # The last element moves to the free index, so that a pop takes constant time.
        position = self._random.randrange(len(self._elements))
        last = self._elements.pop()
        if position == len(self._elements):
            return last
        taken, self._elements[position] = self._elements[position], last
        return taken


class PriorityOrder(ElementOrder):
    """The element with the lowest priority number next; of equal ones, the first that was put in."""

    def __init__(self, priority_of: Callable[[Element], int]) -> None:
        self._elements = []
        self._priority_of = priority_of
        self._serials = itertools.count()

    def push(self, element: Element) -> None:
        heapq.heappush(self._elements, (self._priority_of(element), next(self._serials), element))

    def pop(self) -> Element:
        return heapq.heappop(self._elements)[2]

    def contents(self) -> list[Element]:
        return [element for _, _, element in sorted(self._elements, key=lambda entry: entry[1])]


class QueueMachine:
    """One queue of at most `capacity` elements."""

    def __init__(self, capacity: int, order: ElementOrder) -> None:
        self.capacity = capacity
        self.order = order
        self.is_closed = False
        #: Numbers of the elements that were put in, by feed.
        self.fed: dict[str, IndexSet] = {}
        #: By ticket, in the order of requests: the elements of each pending enqueue that are not in, and which element
        #: of a feed it is.
        self._enqueuing: OrderedDict[int, tuple[deque[Element], FedElement | None]] = OrderedDict()
        #: By ticket, in the order of requests: the number of elements that each pending dequeue wants, and `or_fewer`.
        self._dequeuing: OrderedDict[int, tuple[int, bool]] = OrderedDict()

    def enqueue(self, ticket: int, elements: Iterable[Element], of: FedElement | None = None) -> list[QueueCommand]:
        """Put elements in, or the one element `of` a feed. Those in stay in, if the wait for the rest ends early."""
        rest = deque(elements)
        if self._is_in(of):
            return [Serve(ticket)]
        if self.is_closed:
            return [Fail(ticket, len(rest))]
        self._enqueuing[ticket] = rest, of
        return self._advance()

    def dequeue(self, ticket: int, count: int, or_fewer: bool = False) -> list[QueueCommand]:
        """Take `count` elements; with `or_fewer`, take fewer if the queue is closed and not empty."""
        self._dequeuing[ticket] = count, or_fewer
        return self._advance()

    def close(self, cancel_pending: bool = False) -> list[QueueCommand]:
        """Refuse later enqueues; with `cancel_pending`, pending ones fail too."""
        self.is_closed = True
        failed: list[QueueCommand] = []
        if cancel_pending:
            failed += [Fail(ticket, len(rest)) for ticket, (rest, _) in self._enqueuing.items()]
            self._enqueuing.clear()
        return failed + self._advance()

    def return_to(self, order: ElementOrder, is_closed: bool, fed: dict[str, IndexSet]) -> list[QueueCommand]:
        """Replace the elements; a closed queue stays closed. Pending operations go on with the new elements."""
        self.order, self.fed = order, fed
        return self.close() if is_closed else self._advance()

    def abandon(self, ticket: int) -> list[QueueCommand]:
        """Forget a pending operation: its deadline has passed, or it was cancelled."""
        self._enqueuing.pop(ticket, None)
        self._dequeuing.pop(ticket, None)
        return self._advance()

    def left(self, ticket: int) -> int:
        """Return the number of elements of a pending enqueue that are not in."""
        return len(self._enqueuing[ticket][0]) if ticket in self._enqueuing else 0

    def _advance(self) -> list[QueueCommand]:
        """Serve waiters until the first one of each kind has to wait."""
        commands: list[QueueCommand] = []
        while (command := self._let_in() or self._give_out()) is not None:
            commands.append(command)
        return commands

    def _let_in(self) -> QueueCommand | None:
        if not self._enqueuing:
            return None
        ticket, (rest, of) = next(iter(self._enqueuing.items()))
        if self._is_in(of):
            rest.clear()
        while rest and len(self.order) < self._room():
            self.order.push(rest.popleft())
            if of is not None:
                self.fed.setdefault(of.feed, IndexSet()).add(range(of.number, of.number + 1))
        if rest:
            return None
        del self._enqueuing[ticket]
        return Serve(ticket)

    def _is_in(self, of: FedElement | None) -> bool:
        """Whether this element of a feed was put in."""
        return of is not None and of.feed in self.fed and of.number in self.fed[of.feed]

    def _room(self) -> int:
        wanted = next(iter(self._dequeuing.values()))[0] + self.order.held_back if self._dequeuing else 0
        return max(self.capacity, wanted)

    def _give_out(self) -> QueueCommand | None:
        if not self._dequeuing:
            return None
        ticket, (wanted, or_fewer) = next(iter(self._dequeuing.items()))
        available = max(0, len(self.order) - (0 if self.is_closed else self.order.held_back))
        count = min(wanted, available) if or_fewer and self.is_closed and available else wanted
        if count > available and not self.is_closed:
            return None
        del self._dequeuing[ticket]
        if count > available:
            return Fail(ticket)
        return Serve(ticket, tuple(self.order.pop() for _ in range(count)))
