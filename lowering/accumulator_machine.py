"""What a conditional accumulator does with gradients and takes, as TensorFlow 1 documents it; no values, no I/O.

A gradient of a step before the accumulator's is dropped; so is one more than the `limit`, which is too late for its
step; others are added. A take waits until as many are there as it wants, or as are said to be enough, gets all that are
there, and the step goes on by one. Takes are served in the order in which they were asked.

Invariant: `count` gradients were added since the last `Give`, and no waiting take that is first could be served.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientApplied:
    """A gradient computed in `step` has come."""

    step: int


@dataclass(frozen=True)
class TakeAsked:
    """Someone, known by `ticket`, wants the mean of `wanted` gradients or more."""

    ticket: int
    wanted: int


@dataclass(frozen=True)
class TakeGivenUp:
    """Who holds `ticket` waits no more."""

    ticket: int


@dataclass(frozen=True)
class StepSet:
    """The step was set from outside."""

    step: int


@dataclass(frozen=True)
class EnoughSet:
    """So many gradients are enough for takes that want more, from now on."""

    count: int


@dataclass(frozen=True)
class Add:
    """Add the gradient that came."""


@dataclass(frozen=True)
class Drop:
    """Leave out the gradient that came: it is of `step`, the accumulator of `now`, or as full as it gets."""

    step: int
    now: int


@dataclass(frozen=True)
class Give:
    """Give the sum of `count` gradients to `ticket`, and begin anew."""

    ticket: int
    count: int


@dataclass(frozen=True)
class WarnOfStepBack:
    """The step was set back, so that gradients that were stale are taken again."""

    before: int
    now: int


Event = GradientApplied | TakeAsked | TakeGivenUp | StepSet | EnoughSet
Command = Add | Drop | Give | WarnOfStepBack


class AccumulatorMachine:
    """Decides; whoever drives it holds the sum and who waits."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._enough: int | None = None
        self.step = 0
        self.count = 0
        self.dropped = 0
        #: By ticket, in order: how many each waiting take wants.
        self._waiting: OrderedDict[int, int] = OrderedDict()

    def is_fresh(self, step: int) -> bool:
        """Whether a gradient of `step` would be added."""
        return step >= self.step and (self._limit is None or self.count < self._limit)

    def handle(self, event: Event) -> list[Command]:
        """What to do now, in order."""
        match event:
            case GradientApplied(step) if not self.is_fresh(step):
                self.dropped += 1
                return [Drop(step, self.step)]
            case GradientApplied():
                self.count += 1
                return [Add(), *self._served()]
            case TakeAsked(ticket, wanted):
                self._waiting[ticket] = wanted
                return self._served()
            case TakeGivenUp(ticket):
                self._waiting.pop(ticket, None)
                return self._served()
            case EnoughSet(count):
                self._enough = count
                return self._served()
            case StepSet(step):
                before, self.step = self.step, step
                return [WarnOfStepBack(before, step)] if step < before else []

    def _served(self) -> list[Command]:
        """Serve the first take, if enough is there: afterwards nothing is, so that it is one at most."""
        ticket, wanted = next(iter(self._waiting.items()), (None, 0))
        if ticket is None or self.count < min(wanted, wanted if self._enough is None else self._enough):
            return []
        del self._waiting[ticket]
        count, self.count = self.count, 0
        self.step += 1
        return [Give(ticket, count)]
