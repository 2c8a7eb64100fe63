"""How much a task may send to another that does not take it, and what happens with the rest.

Why: a value is best pushed, since it is then there when it is wanted. But a task that computes faster than another
takes would fill the other's memory. So values are pushed while no more than a window of them lies untaken; beyond it
the sender keeps the value and sends an offer, and the receiver asks for the value once someone waits for it.

Why this cannot deadlock: no thread waits for room, and a value that is asked for goes past the window. So whatever the
order in which values come and are wanted, a wait ends as it would without a window, a message later.

Invariants: what was pushed to a task and not credited by it is at most the window, or one value. An offer ends once: by
being asked for or declined, with its step, with the other task, or when it expires. A receiver credits each pushed
value once, when it was taken or dropped, and answers each offer at most once. No I/O, no clock, no locks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from dflow.lowering.channel import StepId

Item = TypeVar("Item")

#: What an untaken value costs beside its bytes.
COST_BYTES = 256

#: A receiver credits so much of a window at a time, so that small values cost no messages.
CREDITED_PART = 4


class Offered(NamedTuple):
    """A value that its sender keeps for `destination`."""

    destination: str
    step: StepId
    edge: str


class Outflow(Generic[Item]):
    """The sending half of a task; `Item` is a value that can be sent later."""

    def __init__(self, window_bytes: int) -> None:
        self._window = window_bytes
        self._untaken: dict[str, int] = {}
        self._offers: dict[Offered, Item] = {}

    @property
    def offers(self) -> int:
        """How many values are kept."""
        return len(self._offers)

    def untaken_bytes(self, destination: str) -> int:
        """What was pushed to `destination` and not credited."""
        return self._untaken.get(destination, 0)

    def pushes(self, destination: str, size_bytes: int) -> bool:
        """Whether to push a value; then it counts until it is credited. Otherwise `keep` it and send an offer."""
        untaken = self._untaken.get(destination, 0)
        after = untaken + size_bytes + COST_BYTES
        if untaken and after > self._window:
            return False
        self._untaken[destination] = after
        return True

    def keep(self, offer: Offered, item: Item) -> None:
        """Keep a value that is offered."""
        self._offers[offer] = item

    def end(self, offer: Offered) -> Item | None:
        """The offered value, which was asked for, declined or has expired; None if it was ended before."""
        return self._offers.pop(offer, None)

    def credit(self, destination: str, size_bytes: int) -> None:
        """`destination` has taken so much of what was pushed."""
        self._untaken[destination] = max(0, self._untaken.get(destination, 0) - size_bytes)

    def forget(self, destination: str) -> list[Offered]:
        """The connection to `destination` has ended, and all that was under way with it; returns what was offered."""
        self._untaken.pop(destination, None)
        return self._end_all(lambda offer: offer.destination == destination)

    def abort(self, concerns: Callable[[StepId], bool]) -> list[Offered]:
        """These steps are given up; returns what was offered in them."""
        return self._end_all(lambda offer: concerns(offer.step))

    def _end_all(self, concerns: Callable[[Offered], bool]) -> list[Offered]:
        ended = [offer for offer in self._offers if concerns(offer)]
        for offer in ended:
            del self._offers[offer]
        return ended


@dataclass(frozen=True)
class GiveCredit:
    """Tell the task `to` that so much of what it pushed was taken."""

    to: str
    size_bytes: int


@dataclass(frozen=True)
class Answer:
    """Ask the task `to` for the value that it offered, or with `wanted` false, decline it."""

    to: str
    step: StepId
    edge: str
    wanted: bool


Reaction = GiveCredit | Answer


class _Held(NamedTuple):
    source: str
    cost_bytes: int


class Inflow:
    """The receiving half of a task."""

    def __init__(self, window_bytes: int) -> None:
        self._batch = max(1, window_bytes // CREDITED_PART)
        self._owed: dict[str, int] = {}
        self._held: dict[StepId, dict[str, _Held]] = {}
        self._offered: dict[StepId, dict[str, str]] = {}

    @property
    def held(self) -> int:
        """How many pushed values no one has taken."""
        return sum(map(len, self._held.values()))

    @property
    def offered(self) -> int:
        """How many offers no one has asked for."""
        return sum(map(len, self._offered.values()))

    def came(self, source: str, step: StepId, edge: str, size_bytes: int, *, is_held: bool) -> list[Reaction]:
        """A pushed value came, and lies here untaken or not."""
        cost = size_bytes + COST_BYTES
        if not is_held:
            return self._owe(source, cost)
        self._held.setdefault(step, {})[edge] = _Held(source, cost)
        return []

    def taken(self, step: StepId, edge: str) -> list[Reaction]:
        """The value that lay here was taken."""
        held = self._held.get(step)
        value = held.pop(edge, None) if held else None
        return self._owe(*value) if value is not None else []

    def offer(self, source: str, step: StepId, edge: str, *, is_awaited: bool, is_open: bool) -> list[Reaction]:
        """`source` offers a value of a step that `is_open`, or has ended here; someone waits for it, or not yet."""
        if is_awaited or not is_open:
            return [Answer(source, step, edge, is_awaited)]
        self._offered.setdefault(step, {})[edge] = source
        return []

    def awaited(self, step: StepId, edge: str) -> list[Reaction]:
        """Someone waits for a value that has not come."""
        offered = self._offered.get(step)
        source = offered.pop(edge, None) if offered else None
        return [Answer(source, step, edge, True)] if source is not None else []

    def ended(self, step: StepId) -> list[Reaction]:
        """What is left of the step is dropped."""
        reactions: list[Reaction] = []
        for held in self._held.pop(step, {}).values():
            reactions += self._owe(*held)
        for edge, source in self._offered.pop(step, {}).items():
            reactions.append(Answer(source, step, edge, False))
        return reactions

    def steps_of(self, origin: str) -> list[StepId]:
        """The steps of `origin` of which something is here."""
        return [step for step in {**self._held, **self._offered} if step.origin == origin]

    def forget(self, source: str) -> None:
        """The connection to `source` has ended: what came over it is credited to no one, and its offers are void."""
        self._owed.pop(source, None)
        for held in self._held.values():
            for edge in [edge for edge, value in held.items() if value.source == source]:
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
        return [GiveCredit(source, owed)]
