"""Limits on values pushed to a task before it takes them: the excess is offered instead.

Why: pushing a value is fastest, since it is present when it is needed. But a task that computes faster than another
takes would fill the other's memory. So values are pushed while the untaken ones fit a window. Beyond it the sender
keeps the value and sends an offer, and the receiver requests the value once an op waits for it.

Why this cannot deadlock: no thread waits for room, and a requested value bypasses the window. So in whatever order
values come and are needed, a wait ends as it would without a window, one message later.

Invariants: the bytes pushed to a task and not credited are at most the window, or one value. An offer ends once: when
it is requested or declined, with its step, with the other task, or when it expires. A receiver credits each pushed
value once, when it was taken or dropped, and answers each offer at most once. No I/O, no clock, no locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from dflow.distributed.wire.messages.transfers import Credit, Pull
from dflow.lowering.queues.channel import StepId

Item = TypeVar("Item")

#: Cost of an untaken value in addition to its bytes.
COST_BYTES = 256

#: A receiver sends credit in units of a window divided by this, so that small values cost no messages.
CREDITED_PART = 4


class Offered(NamedTuple):
    """Identity of a value that its sender keeps for `destination`."""

    destination: str
    step: StepId
    edge: str


class Outflow(Generic[Item]):
    """The sending half of a task; `Item` is a value that can be sent later."""

    def __init__(self, window_bytes: int) -> None:
        self._window = window_bytes
        #: By destination, the bytes pushed and not credited, including `COST_BYTES` per value.
        self.untaken: Counter[str] = Counter()
        self._offers: dict[Offered, Item] = {}

    @property
    def offers(self) -> int:
        """Number of values kept."""
        return len(self._offers)

    def pushes(self, destination: str, size_bytes: int) -> bool:
        """Whether to push a value, which then counts until it is credited. If false, `keep` it and send an offer."""
        untaken = self.untaken[destination]
        after = untaken + size_bytes + COST_BYTES
        # A value larger than the window is pushed when no other is untaken.
        if untaken and after > self._window:
            return False
        self.untaken[destination] = after
        return True

    def keep(self, offer: Offered, item: Item) -> None:
        """Keep an offered value."""
        self._offers[offer] = item

    def end(self, offer: Offered) -> Item | None:
        """Remove and return an offered value that was requested, declined or has expired; None if it has ended."""
        return self._offers.pop(offer, None)

    def credit(self, destination: str, size_bytes: int) -> None:
        """Note that `destination` has taken `size_bytes` of the pushed values."""
        self.untaken[destination] = max(0, self.untaken[destination] - size_bytes)

    def forget(self, destination: str) -> list[Offered]:
        """Drop all transfers to `destination`, whose connection has ended; return the offers dropped."""
        del self.untaken[destination]
        return self.end_all(lambda offer: offer.destination == destination)

    def end_all(self, concerns: Callable[[Offered], bool]) -> list[Offered]:
        """Drop the offers that `concerns` returns true of; return them."""
        ended = [offer for offer in self._offers if concerns(offer)]
        for offer in ended:
            del self._offers[offer]
        return ended


class Reaction(NamedTuple):
    """A message for the task `to`: credit for values that it pushed, or the answer to its offer."""

    to: str
    message: Credit | Pull


class Inflow:
    """The receiving half of a task."""

    def __init__(self, window_bytes: int) -> None:
        self._batch = max(1, window_bytes // CREDITED_PART)
        self._owed: dict[str, int] = {}
        #: By step and edge, the source and the cost of each untaken value, and the source of each offer.
        self._held: dict[StepId, dict[str, tuple[str, int]]] = {}
        self._offered: dict[StepId, dict[str, str]] = {}

    @property
    def held(self) -> int:
        """Number of pushed values not taken yet."""
        return sum(map(len, self._held.values()))

    @property
    def offered(self) -> int:
        """Number of offers not answered yet."""
        return sum(map(len, self._offered.values()))

    def came(self, source: str, step: StepId, edge: str, size_bytes: int, *, is_held: bool) -> list[Reaction]:
        """Count a pushed value that arrived; `is_held`: it waits to be taken."""
        cost = size_bytes + COST_BYTES
        if not is_held:
            return self._owe(source, cost)
        self._held.setdefault(step, {})[edge] = source, cost
        return []

    def taken(self, step: StepId, edge: str) -> list[Reaction]:
        """Count a waiting value as taken."""
        value = self._held.get(step, {}).pop(edge, None)
        return self._owe(*value) if value is not None else []

    def offer(self, source: str, step: StepId, edge: str, *, is_awaited: bool, is_open: bool) -> list[Reaction]:
        """Handle an offer of `source`: request the value if `is_awaited`, decline it if the step is not `is_open`."""
        if is_awaited or not is_open:
            return [_answer(source, step, edge, wanted=is_awaited)]
        self._offered.setdefault(step, {})[edge] = source
        return []

    def awaited(self, step: StepId, edge: str) -> list[Reaction]:
        """Request the value, which an op now waits for, if it was offered."""
        source = self._offered.get(step, {}).pop(edge, None)
        return [_answer(source, step, edge, wanted=True)] if source is not None else []

    def ended(self, step: StepId) -> list[Reaction]:
        """Credit and decline what remains of a step, which is dropped."""
        credits = [one for held in self._held.pop(step, {}).values() for one in self._owe(*held)]
        offered = self._offered.pop(step, {}).items()
        return [*credits, *(_answer(source, step, edge, wanted=False) for edge, source in offered)]

    def steps_of(self, origin: str) -> list[StepId]:
        """The steps of `origin` with held or offered values here."""
        return [step for step in {**self._held, **self._offered} if step.origin == origin]

    def forget(self, source: str) -> None:
        """Forget `source`, whose connection has ended: its values are no longer credited, its offers are void."""
        self._owed.pop(source, None)
        for held in self._held.values():
            for edge in [edge for edge, (by, _) in held.items() if by == source]:
                del held[edge]
        for offered in self._offered.values():
            for edge in [edge for edge, by in offered.items() if by == source]:
                del offered[edge]

    def _owe(self, source: str, cost_bytes: int) -> list[Reaction]:
        owed = self._owed.get(source, 0) + cost_bytes
        if owed < self._batch:
            self._owed[source] = owed
            return []
        self._owed[source] = 0
        return [Reaction(source, Credit(owed))]


def _answer(source: str, step: StepId, edge: str, *, wanted: bool) -> Reaction:
    return Reaction(source, Pull(step.origin, step.number, edge, wanted))
