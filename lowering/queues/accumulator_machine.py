"""The state machine of a conditional accumulator, as TensorFlow 1 documents it, without values and without I/O.

A gradient of a step before the accumulator's is dropped, and so is one beyond the `limit` of a step. Others are added.
A take waits until the number of gradients reaches the number that it wants or that of `EnoughSet`. It gets the sum of
all gradients, and the step increases by one. Takes are served in the order of their requests.

Invariant: `count` gradients were added since the last `Give`, and they are too few for the first pending take.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientApplied:
    """A gradient computed in `step` has arrived."""

    step: int


@dataclass(frozen=True)
class TakeAsked:
    """The take with this `ticket` wants the mean of at least `wanted` gradients."""

    ticket: int
    wanted: int


@dataclass(frozen=True)
class TakeGivenUp:
    """The take with this `ticket` was abandoned."""

    ticket: int


@dataclass(frozen=True)
class StepSet:
    """The caller set the step."""

    step: int


@dataclass(frozen=True)
class EnoughSet:
    """From now on `count` gradients suffice, also for takes that want more."""

    count: int


@dataclass(frozen=True)
class Add:
    """Add the gradient that arrived."""


@dataclass(frozen=True)
class Drop:
    """Drop the gradient of `step`: the accumulator's step `now` is later, or it has reached its limit."""

    step: int
    now: int


@dataclass(frozen=True)
class Give:
    """Answer the take with this `ticket` from the sum of `count` gradients, and reset the sum."""

    ticket: int
    count: int


@dataclass(frozen=True)
class WarnOfStepBack:
    """Warn that the step was set back, so that gradients that were stale are accepted again."""

    before: int
    now: int


AccumulatorEvent = GradientApplied | TakeAsked | TakeGivenUp | StepSet | EnoughSet
AccumulatorCommand = Add | Drop | Give | WarnOfStepBack


class AccumulatorMachine:
    """Turns events into commands. Its owner holds the sum and the callbacks of the takes."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._enough: int | None = None
        self.step = 0
        self.count = 0
        self.dropped = 0
        #: Number of gradients that each pending take wants, by ticket, in the order of requests.
        self._waiting: OrderedDict[int, int] = OrderedDict()

    def is_fresh(self, step: int) -> bool:
        """Whether a gradient of `step` would be added."""
        return step >= self.step and (self._limit is None or self.count < self._limit)

    def handle(self, event: AccumulatorEvent) -> list[AccumulatorCommand]:
        """Apply an event and return the commands to execute, in order."""
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

    def _served(self) -> list[AccumulatorCommand]:
        """Serve the first pending take, if there are enough gradients. None are left then for a second one."""
        ticket, wanted = next(iter(self._waiting.items()), (None, 0))
        if ticket is None or self.count < min(wanted, wanted if self._enough is None else self._enough):
            return []
        del self._waiting[ticket]
        count, self.count = self.count, 0
        self.step += 1
        return [Give(ticket, count)]
