"""The state machine of a conditional accumulator, as TensorFlow 1 documents it, without values and without I/O.

A gradient of a step before the accumulator's is dropped, and so is one beyond the `limit` of a step. Others are added.
A take waits until the number of gradients reaches the number that it wants, or the number that is enough for all. It
gets the sum of all gradients, and the step increases by one. Takes are served in the order of their requests.

A gradient may also be kept aside under a ticket, until a later decision, such as another task's, chooses the gradients
to sum. A gradient kept for a later step makes those kept for earlier steps stale.

Invariant: `count` gradients were added since the last take was served, and they are too few for the first pending one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

#: Answer the take with this ticket from the sum of this number of gradients, and reset the sum.
Give = tuple[int, int]


class AccumulatorMachine:
    """Decides which gradients are added and which take gets their sum. Its owner holds the sum."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._enough: int | None = None
        self.step = 0
        self.count = 0
        self.dropped = 0
        #: Number of gradients that each pending take wants, by ticket, in the order of requests.
        self._waiting: OrderedDict[int, int] = OrderedDict()
        #: The steps of the gradients kept aside, by ticket.
        self.kept: dict[int, int] = {}
        self._last_ticket = 0

    def is_fresh(self, step: int) -> bool:
        """Whether a gradient of `step` would be added."""
        return step >= self.step and (self._limit is None or self.count < self._limit)

    def apply(self, step: int) -> list[Give]:
        """Count a gradient computed in `step`, as added if it is fresh, else as dropped."""
        if not self.is_fresh(step):
            self.dropped += 1
            return []
        self.count += 1
        return self._served()

    def keep(self, step: int) -> int:
        """Return the ticket of a gradient computed in `step`; 0 if it is stale, and dropped."""
        if step < self.step:
            self.dropped += 1
            return 0
        self._advance(step)
        self._last_ticket += 1
        self.kept[self._last_ticket] = step
        return self._last_ticket

    def take_kept(self, tickets: Sequence[int]) -> None:
        """Remove the gradients with these tickets, which are all kept; drop the others of their step."""
        self._advance(1 + max(self.kept.pop(ticket) for ticket in tickets))

    def _advance(self, step: int) -> None:
        """Set the step unless it is later; drop the kept gradients that become stale."""
        self.step = max(self.step, step)
        stale = [ticket for ticket, its_step in self.kept.items() if its_step < self.step]
        self.dropped += len(stale)
        for ticket in stale:
            del self.kept[ticket]

    def take(self, ticket: int, wanted: int) -> list[Give]:
        """Ask for at least `wanted` gradients."""
        self._waiting[ticket] = wanted
        return self._served()

    def abandon(self, ticket: int) -> list[Give]:
        """Forget a pending take."""
        self._waiting.pop(ticket, None)
        return self._served()

    def set_enough(self, count: int) -> list[Give]:
        """From now on `count` gradients suffice, also for takes that want more."""
        self._enough = count
        return self._served()

    def set_step(self, step: int) -> int:
        """Set the step; return the step before."""
        before, self.step = self.step, step
        return before

    def saved(self) -> dict[str, Any]:
        """Return its numbers, in a form that JSON can hold."""
        return {
            "enough": self._enough,
            "step": self.step,
            "count": self.count,
            "dropped": self.dropped,
            "kept": [*self.kept.items()],
            "last_ticket": self._last_ticket,
        }

    def return_to(self, saved: Mapping[str, Any]) -> list[Give]:
        """Set the numbers to those of `saved`; pending takes go on with them."""
        self._enough, self.step, self.count, self.dropped = (
            saved[key] for key in ("enough", "step", "count", "dropped")
        )
        self.kept, self._last_ticket = dict(saved["kept"]), saved["last_ticket"]
        return self._served()

    def _served(self) -> list[Give]:
        """Serve the first pending take, if there are enough gradients. None are left then for a second one."""
        ticket, wanted = next(iter(self._waiting.items()), (None, 0))
        if ticket is None or self.count < min(wanted, wanted if self._enough is None else self._enough):
            return []
        del self._waiting[ticket]
        count, self.count = self.count, 0
        self.step += 1
        return [(ticket, count)]
