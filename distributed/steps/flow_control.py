"""Limits on values pushed to a task before it takes them: the excess is offered instead.

Why: pushing a value is fastest, since it is present when it is needed. But tasks that compute faster than another
takes would fill the other's memory. So each receiver has a window of bytes, divided equally among its possible senders.
Values are pushed while the untaken ones fit the sender's share. Beyond it the sender keeps the value and sends an
offer, and the receiver requests the value once an op waits for it, and once the requested values fit the window.

Why this cannot deadlock: no thread waits for room. A requested value was waited for, so it is taken when it arrives,
which makes room for the next request. So in whatever order values come and are needed, a wait ends as it would without
a window, some messages later.

Both halves know the other task by the connection over which a value or an offer went: two tasks may have one each that
they opened at the same time, and what went over one does not end with the other.

Invariants: the bytes pushed over a connection and not credited are at most the window. The bytes requested and not
arrived are at most the window, or one value. An offer ends once: when it is requested or declined, with its step, with
its connection, or when it expires. A receiver credits each pushed value once, when it was taken or dropped, and answers
each offer at most once. No I/O, no clock, no locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.transfers import Credit, Pull
from dflow.lowering.queues.channel import StepId

Item = TypeVar("Item")

#: Cost of an untaken value in addition to its bytes.
COST_BYTES = 256

#: A receiver sends credit in units of a share divided by this, so that small values cost no messages.
CREDITED_PART = 4


class Offered(NamedTuple):
    """Identity of a value that its sender keeps for `peer`."""

    peer: Peer
    step: StepId
    edge: str


class Outflow(Generic[Item]):
    """The sending half of a task's flow control; `Item` is a value that can be sent later."""

    def __init__(self, window_bytes: int) -> None:
        self._window = window_bytes
        #: Number of tasks that may send to one receiver.
        self.senders = 1
        #: By connection, the bytes pushed and not credited, including `COST_BYTES` per value.
        self.untaken: Counter[Peer] = Counter()
        #: The offered values, until they are requested, declined, or expire.
        self.kept: dict[Offered, Item] = {}

    def pushes(self, peer: Peer, size_bytes: int) -> bool:
        """Reserve room in the receiver's window and return true if a value may be pushed now.

        If false, the caller keeps the value and sends an offer.
        """
        after = self.untaken[peer] + size_bytes + COST_BYTES
        if after > self._window // self.senders:
            return False
        self.untaken[peer] = after
        return True

    def credit(self, peer: Peer, size_bytes: int) -> None:
        """Free `size_bytes` of the receiver's window, on its credit for values that it has taken."""
        left = self.untaken.pop(peer, 0) - size_bytes
        if left > 0:
            self.untaken[peer] = left

    def forget(self, has_ended: Callable[[Peer], bool]) -> None:
        """Drop the offers over connections that have ended, and free their windows."""
        for peer in [peer for peer in self.untaken if has_ended(peer)]:
            del self.untaken[peer]
        self.end_all(lambda offer: has_ended(offer.peer))

    def end_all(self, concerns: Callable[[Offered], bool]) -> None:
        """Drop the offers for which `concerns` returns true, and their values."""
        for offer in [offer for offer in self.kept if concerns(offer)]:
            del self.kept[offer]


#: A connection, and a message to send: credit for values that came over it, or the answer to an offer.
Reaction = tuple[Peer, Credit | Pull]


class Inflow:
    """The receiving half of a task's flow control; its methods return the messages to send."""

    def __init__(self, window_bytes: int) -> None:
        self._window = window_bytes
        #: Number of tasks that may send to this one.
        self.senders = 1
        self._owed: dict[Peer, int] = {}
        #: By step and edge: source and size of each untaken value; source and size of each offer not awaited yet; of
        #: each awaited offer that is not requested yet, oldest first; and of each requested value that has not come.
        self._held: dict[StepId, dict[str, tuple[Peer, int]]] = {}
        self.unanswered: dict[StepId, dict[str, tuple[Peer, int]]] = {}
        self._queued: dict[tuple[StepId, str], tuple[Peer, int]] = {}
        self._requested: dict[tuple[StepId, str], tuple[Peer, int]] = {}
        #: Total size of the requested values that have not come.
        self.requested_bytes = 0

    @property
    def held(self) -> int:
        """Number of pushed values not taken yet."""
        return sum(map(len, self._held.values()))

    @property
    def offered(self) -> int:
        """Number of offers not answered yet."""
        return sum(map(len, self.unanswered.values())) + len(self._queued)

    def hold(self, source: Peer, step: StepId, edge: str, size_bytes: int) -> None:
        """Count a pushed value that arrived and waits to be taken."""
        self._held.setdefault(step, {})[edge] = source, size_bytes

    def taken(self, step: StepId, edge: str) -> list[Reaction]:
        """Record that a held value, if any, was taken; return the credit for it as `used` does."""
        value = self._held.get(step, {}).pop(edge, None)
        return self.used(*value) if value is not None else []

    def used(self, source: Peer, size_bytes: int) -> list[Reaction]:
        """Owe `source` credit for a pushed value that was taken or dropped; return its credit if enough is owed."""
        owed = self._owed.get(source, 0) + size_bytes + COST_BYTES
        if owed < self._window // self.senders // CREDITED_PART:
            self._owed[source] = owed
            return []
        self._owed[source] = 0
        return [(source, Credit(owed))]

    def offer(
        self, source: Peer, step: StepId, edge: str, size_bytes: int, *, is_awaited: bool, is_open: bool
    ) -> list[Reaction]:
        """Record an offer of `source`: request its value if `is_awaited`, once it fits the window.

        Decline the offer if the value is not awaited and the step is not `is_open`.
        """
        if is_awaited:
            self._queued[step, edge] = source, size_bytes
            return self._requests()
        if not is_open:
            return [_answer(source, step, edge, wanted=False)]
        self.unanswered.setdefault(step, {})[edge] = source, size_bytes
        return []

    def awaited(self, step: StepId, edge: str) -> list[Reaction]:
        """Request a value that an op waits for, if it was offered; later if it does not fit the window now."""
        offered = self.unanswered.get(step, {}).pop(edge, None)
        if offered is None:
            return []
        self._queued[step, edge] = offered
        return self._requests()

    def pulled(self, step: StepId, edge: str) -> list[Reaction]:
        """Record that a requested value has arrived; request others that fit the window now."""
        return self._requests() if self._end_request(step, edge) else []

    def ended(self, step: StepId) -> list[Reaction]:
        """Drop a step: credit its held values, decline its offers, and request other values that fit the window now."""
        if not (self._held or self.unanswered or self._queued or self._requested):
            return []
        credits = [one for held in self._held.pop(step, {}).values() for one in self.used(*held)]
        offered = list(self.unanswered.pop(step, {}).items())
        if self._queued:
            queued = [key for key in self._queued if key[0] == step]
            offered += [(edge, self._queued.pop((step, edge))) for _, edge in queued]
        declined = [_answer(source, step, edge, wanted=False) for edge, (source, _) in offered]
        requested = [edge for other, edge in self._requested if other == step] if self._requested else []
        for edge in requested:
            self._end_request(step, edge)
        return [*credits, *declined, *(self._requests() if requested else ())]

    def steps_of(self, origin: str) -> list[StepId]:
        """The steps of `origin` with held, offered or requested values here."""
        found = {**self._held, **self.unanswered}.keys() | {step for step, _ in (*self._queued, *self._requested)}
        return [step for step in found if step.origin == origin]

    def forget(self, has_ended: Callable[[Peer], bool]) -> list[Reaction]:
        """Forget the values, offers and credit of connections that have ended.

        Request values of others that fit the window now.
        """
        for peer in [peer for peer in self._owed if has_ended(peer)]:
            del self._owed[peer]
        by_key: list[dict[Any, tuple[Peer, int]]] = [*self._held.values(), *self.unanswered.values(), self._queued]
        for values in by_key:
            for key in [key for key, (source, _) in values.items() if has_ended(source)]:
                del values[key]
        for step, edge in [key for key, (source, _) in self._requested.items() if has_ended(source)]:
            self._end_request(step, edge)
        return self._requests()

    def _requests(self) -> list[Reaction]:
        """Request the oldest awaited values that fit the window, at least one if no requested value is on its way."""
        found = []
        while self._queued:
            (step, edge), (source, size_bytes) = next(iter(self._queued.items()))
            if self._requested and self.requested_bytes + size_bytes > self._window:
                break
            del self._queued[step, edge]
            self._requested[step, edge] = source, size_bytes
            self.requested_bytes += size_bytes
            found.append(_answer(source, step, edge, wanted=True))
        return found

    def _end_request(self, step: StepId, edge: str) -> bool:
        requested = self._requested.pop((step, edge), None)
        if requested is not None:
            self.requested_bytes -= requested[1]
        return requested is not None


def _answer(source: Peer, step: StepId, edge: str, *, wanted: bool) -> Reaction:
    return source, Pull(step.origin, step.number, edge, wanted)
