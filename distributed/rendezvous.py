"""Matching what is sent with what is awaited, by step and edge; either may come first.

Why: tasks run their parts of a step without telling each other when, so a value may be here before anyone wants it,
and must find its waiter later.

Invariants:

- An edge carries at most one value in a step, and has at most one waiter; whatever comes second is dropped or
  refused. Of an edge in a turn of a loop nothing is kept once its value was delivered, so that a loop may turn for
  ever; a second value of it would be dropped when the step ends.
- Every waiter that `take` was given is handed to exactly one `EndWait`, by the call that ends its wait.
- Nothing is kept for a step that has ended, but the fact. Per origin that is one number, below which every step has
  ended, and at most `WINDOW` numbers above it. So the steps of an origin are numbered upwards and may overlap, but a
  step first heard of after `WINDOW` later ones have ended counts as ended; a step that has begun never does.
- No I/O, no clock, no locks: whoever owns a rendezvous calls it from one thread at a time, and carries out what it
  returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from dflow.lowering.channel import StepId, is_in_loop
from dflow.tracing.errors import DflowError, InternalError, StepCancelled
from dflow.tracing.task_name import short_task_name

Waiter = TypeVar("Waiter")
Value = TypeVar("Value")

#: How many ended steps of an origin are remembered above the mark below which all have ended.
WINDOW = 256


class EndWait(msgspec.Struct, Generic[Waiter, Value], frozen=True):
    """Tell `waiter` the value it waited for, or why there will be none."""

    waiter: Waiter
    outcome: Value | BaseException


@dataclass(frozen=True)
class RendezvousStatistics:
    """What a rendezvous holds now, and what it has done since it was made.

    `open_steps`  steps that have begun or hold something
    `values`      values no one has taken yet
    `waiters`     waits that have not ended
    `delivered`   values handed to a waiter, in all
    `dropped`     values that came twice, or for a step that had ended, or were not taken before it ended, in all
    `remembered`  numbers of ended steps that are kept
    """

    open_steps: int
    values: int
    waiters: int
    delivered: int
    dropped: int
    remembered: int


class _Waiting(msgspec.Struct, Generic[Waiter], frozen=True):
    waiter: Waiter
    source: str


class _Held(msgspec.Struct, Generic[Value], frozen=True):
    value: Value


class _Done:
    """The place of an edge whose value was delivered, or whose wait ended without."""


_DONE = _Done()


class _Step(Generic[Waiter, Value]):
    __slots__ = ("edges",)

    def __init__(self) -> None:
        self.edges: dict[str, _Waiting[Waiter] | _Held[Value] | _Done] = {}

    def delivered(self, edge: str) -> None:
        if is_in_loop(edge):
            del self.edges[edge]
        else:
            self.edges[edge] = _DONE


@dataclass
class _Ended:
    """Which steps of one origin have ended: all below `low`, and those in `above`."""

    low: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, number: int) -> bool:
        return number < self.low or number in self.above

    def add(self, number: int) -> None:
        if number >= self.low:
            self.above.add(number)
        if len(self.above) > WINDOW:
            self.low = min(self.above)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1


class Rendezvous(Generic[Waiter, Value]):
    """The meeting place of one task; `Waiter` is whatever its owner can end a wait with."""

    def __init__(self) -> None:
        self._steps: dict[StepId, _Step[Waiter, Value]] = {}
        self._ended: dict[str, _Ended] = {}
        self._lost: dict[str, DflowError] = {}
        self._delivered = 0
        self._dropped = 0

    def begin(self, step: StepId) -> None:
        """This task has its part in the step, which ends by `finish`, `abort` or `lose`.

        raises  StepCancelled if the step has ended already; the origin's own error if that was lost
        """
        self._open(step)

    def count_from(self, origin: str, number: int) -> None:
        """Steps of `origin` below `number` are of its past lives: what still comes for them is dropped."""
        ended = self._ended.setdefault(origin, _Ended())
        ended.low = max(ended.low, number)
        ended.above = {above for above in ended.above if above >= ended.low}

    def put(self, step: StepId, edge: str, value: Value) -> list[EndWait[Waiter, Value]]:
        """A value came; it is dropped if the step has ended, or the edge has had its value."""
        try:
            opened = self._open(step)
        except DflowError:
            self._dropped += 1
            return []
        edges = opened.edges
        place = edges.get(edge)
        if place is None:
            edges[edge] = _Held(value)
            return []
        if not isinstance(place, _Waiting):
            self._dropped += 1
            return []
        opened.delivered(edge)
        self._delivered += 1
        return [EndWait(place.waiter, value)]

    def take(self, step: StepId, edge: str, source: str, waiter: Waiter) -> list[EndWait[Waiter, Value]]:
        """Someone waits for the value that the task `source` sends; ends at once if it is here, or cannot come."""
        try:
            opened = self._open(step)
        except DflowError as error:
            return [EndWait(waiter, error)]
        edges = opened.edges
        place = edges.get(edge)
        if isinstance(place, _Held):
            opened.delivered(edge)
            self._delivered += 1
            return [EndWait(waiter, place.value)]
        if place is not None:
            return [EndWait(waiter, InternalError(f"edge {edge!r} is awaited twice in {describe(step)}"))]
        if source in self._lost:
            return [EndWait(waiter, self._lost[source])]
        edges[edge] = _Waiting(waiter, source)
        return []

    def holds(self, step: StepId, edge: str) -> bool:
        """Whether a value lies here that no one has taken."""
        opened = self._steps.get(step)
        return opened is not None and isinstance(opened.edges.get(edge), _Held)

    def is_open(self, step: StepId) -> bool:
        """Whether the step may still go on here."""
        ended = self._ended.get(step.origin)
        return step in self._steps or not (step.origin in self._lost or (ended is not None and step.number in ended))

    def expire(self, step: StepId, edge: str, error: BaseException) -> list[EndWait[Waiter, Value]]:
        """A wait has lasted too long; nothing happens if it has ended."""
        opened = self._steps.get(step)
        place = opened.edges.get(edge) if opened is not None else None
        if opened is None or not isinstance(place, _Waiting):
            return []
        opened.edges[edge] = _DONE
        return [EndWait(place.waiter, error)]

    def finish(self, step: StepId) -> list[EndWait[Waiter, Value]]:
        """This task's part has ended; what is left of it is dropped."""
        return self.abort(step, StepCancelled(f"{describe(step)} has ended"))

    def abort(self, step: StepId, error: BaseException) -> list[EndWait[Waiter, Value]]:
        """The step is given up: its waits end with `error`, its values are dropped, as are those still to come."""
        ended = self._ended.get(step.origin)
        if ended is None:
            ended = self._ended[step.origin] = _Ended()
        ended.add(step.number)
        commands: list[EndWait[Waiter, Value]] = []
        opened = self._steps.pop(step, None)
        for place in opened.edges.values() if opened is not None else ():
            if isinstance(place, _Waiting):
                commands.append(EndWait(place.waiter, error))
            elif place is not _DONE:
                self._dropped += 1
        return commands

    def stop_waiting_for(self, source: str, error: BaseException) -> list[EndWait[Waiter, Value]]:
        """Values that `source` sent may be lost: end the waits for them with `error`."""
        commands: list[EndWait[Waiter, Value]] = []
        for opened in self._steps.values():
            for edge, place in opened.edges.items():
                if isinstance(place, _Waiting) and place.source == source:
                    opened.edges[edge] = _DONE
                    commands.append(EndWait(place.waiter, error))
        return commands

    def lose(self, task: str, error: DflowError) -> list[EndWait[Waiter, Value]]:
        """A task has left: the steps it started are aborted, and waits for its values end, now and until `welcome`.

        Its count of steps is forgotten, since a task of that name may come back and count anew. What ends now, or
        until then, is remembered: its values may still be on their way when the same task has come back.
        """
        commands = self.stop_waiting_for(task, error)
        if task not in self._lost:
            self._ended.pop(task, None)
        for step in [step for step in self._steps if step.origin == task]:
            commands += self.abort(step, error)
        self._lost[task] = error
        return commands

    def welcome(self, task: str) -> None:
        """A task of this name is in the cluster (again)."""
        self._lost.pop(task, None)

    def is_lost(self, task: str) -> bool:
        """Whether a task has left, and none of its name has come since."""
        return task in self._lost

    def open_steps(self, origin: str) -> tuple[StepId, ...]:
        """The steps of `origin` that have begun or hold something."""
        return tuple(step for step in self._steps if step.origin == origin)

    def statistics(self) -> RendezvousStatistics:
        """What is held, and what was done."""
        return RendezvousStatistics(
            open_steps=len(self._steps),
            values=self._count(lambda place: isinstance(place, _Held)),
            waiters=self._count(lambda place: isinstance(place, _Waiting)),
            delivered=self._delivered,
            dropped=self._dropped,
            remembered=sum(len(ended.above) for ended in self._ended.values()),
        )

    def _open(self, step: StepId) -> _Step[Waiter, Value]:
        """The state of a step that may still go on, made if this is the first that is heard of it."""
        opened = self._steps.get(step)
        if opened is not None:
            return opened
        if step.origin in self._lost:
            raise self._lost[step.origin]
        ended = self._ended.get(step.origin)
        if ended is not None and step.number in ended:
            raise StepCancelled(f"{describe(step)} has ended here, or was cancelled")
        opened = self._steps[step] = _Step()
        return opened

    def _count(self, matches: Callable[[object], bool]) -> int:
        return sum(matches(place) for opened in self._steps.values() for place in opened.edges.values())


def describe(step: StepId) -> str:
    """The step in words."""
    return f"step {step.place} of {short_task_name(step.origin)}"
