"""Matching of sent values with pending receives, by step and edge; either may come first.

Why: tasks run their parts of a step without notifying each other when, so a value may arrive before the op that
receives it has started.

Invariants:

- An edge carries at most one value in a step, and has at most one waiter; the second one is dropped or refused. An
  edge in an iteration of a loop is forgotten once its value was delivered, so that a loop may iterate for ever; a
  second value of it would be dropped when the step ends.
- Every waiter passed to `take` is in exactly one `EndWait`, returned by the call that ends its wait.
- Of a step that has ended only that fact is kept. Per origin that is one number, below which every step has ended, and
  at most `WINDOW` numbers above it. So the steps of an origin are numbered upwards and may overlap, but a step first
  heard of after `WINDOW` later ones have ended counts as ended; a step that has begun never does.
- No I/O, no clock, no locks: the owner of a rendezvous calls it from one thread at a time, and carries out the
  commands that it returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from dflow.lowering.queues.channel import ITERATION, StepId
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DflowError, InternalError, StepCancelled

Waiter = TypeVar("Waiter")
Value = TypeVar("Value")

#: At most this many numbers of ended steps are remembered per origin, above the number below which all have ended.
WINDOW = 256


#: Command: pass the waiter the value it waited for, or the error that explains why there is none.
EndWait = tuple[Waiter, Outcome[Value]]


@dataclass(frozen=True)
class RendezvousStatistics:
    """Present contents of a rendezvous, and its counters since it was made.

    `open_steps`  number of steps that have begun or hold something
    `values`      number of values not taken yet
    `waiters`     number of waits that have not ended
    `delivered`   total of values passed to a waiter
    `dropped`     total of values that came twice, came for a step that had ended, or were not taken before it ended
    `remembered`  number of ended steps that are remembered
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


#: The edges of a step; None for one whose value was delivered, or whose wait ended without a value.
_Edges = dict[str, _Waiting[Waiter] | _Held[Value] | None]


@dataclass
class _EndedSteps:
    """The ended steps of one origin: all below `low`, and those in `above`."""

    low: int = 0
    above: set[int] = field(default_factory=set)

    def add(self, number: int) -> None:
        if number >= self.low:
            self.above.add(number)
        # Steps in the lowest gap count as ended from now on.
        if len(self.above) > WINDOW:
            self.low = min(self.above)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1


class Rendezvous(Generic[Waiter, Value]):
    """The rendezvous of one task; a `Waiter` is anything with which its owner can end a wait."""

    def __init__(self) -> None:
        self._steps: dict[StepId, _Edges[Waiter, Value]] = {}
        self._ended: dict[str, _EndedSteps] = defaultdict(_EndedSteps)
        self._lost: dict[str, DflowError] = {}
        self._delivered = 0
        self._dropped = 0

    def begin(self, step: StepId) -> _Edges[Waiter, Value]:
        """Begin the step here, if it has not begun, until `finish`, `abort` or `lose`; return its edges.

        raises  StepCancelled if the step has ended already; the error of `lose` if the origin was lost
        """
        edges = self._steps.get(step)
        if edges is not None:
            return edges
        if step.origin in self._lost:
            raise self._lost[step.origin]
        if self._has_ended(step):
            raise StepCancelled(f"{describe(step)} has ended here, or was cancelled")
        return self._steps.setdefault(step, {})

    def count_from(self, origin: str, number: int) -> None:
        """Treat steps of `origin` below `number` as ended, since earlier lives started them; drop later values."""
        ended = self._ended[origin]
        ended.low = max(ended.low, number)
        ended.above = {above for above in ended.above if above >= ended.low}

    def put(self, step: StepId, edge: str, value: Value) -> list[EndWait[Waiter, Value]]:
        """Store or deliver a received value; drop it if the step has ended, or the edge has had its value."""
        try:
            edges = self.begin(step)
        except DflowError:
            self._dropped += 1
            return []
        state = edges.get(edge)
        if edge not in edges:
            edges[edge] = _Held(value)
            return []
        if not isinstance(state, _Waiting):
            self._dropped += 1
            return []
        self._deliver(edges, edge)
        return [(state.waiter, value)]

    def take(self, step: StepId, edge: str, source: str, waiter: Waiter) -> list[EndWait[Waiter, Value]]:
        """Add a wait for a value that the task `source` sends; end it now if the value is here, or cannot come."""
        try:
            edges = self.begin(step)
        except DflowError as error:
            return [(waiter, error)]
        state = edges.get(edge)
        if isinstance(state, _Held):
            self._deliver(edges, edge)
            return [(waiter, state.value)]
        if edge in edges:
            return [(waiter, InternalError(f"edge {edge!r} is awaited twice in {describe(step)}"))]
        if source in self._lost:
            return [(waiter, self._lost[source])]
        edges[edge] = _Waiting(waiter, source)
        return []

    def _deliver(self, edges: _Edges[Waiter, Value], edge: str) -> None:
        self._delivered += 1
        if ITERATION in edge:
            del edges[edge]
        else:
            edges[edge] = None

    def holds(self, step: StepId, edge: str) -> bool:
        """Whether a value is here and not taken."""
        opened = self._steps.get(step)
        return opened is not None and isinstance(opened.get(edge), _Held)

    def is_awaited(self, step: StepId, edge: str) -> bool:
        """Whether a waiter waits for the value."""
        opened = self._steps.get(step)
        return opened is not None and isinstance(opened.get(edge), _Waiting)

    def is_open(self, step: StepId) -> bool:
        """Whether the step has not ended here, and its origin is not lost."""
        return step in self._steps or not (step.origin in self._lost or self._has_ended(step))

    def expire(self, step: StepId, edge: str, error: BaseException) -> list[EndWait[Waiter, Value]]:
        """End a wait, which has timed out, with `error`; does nothing if it has ended."""
        edges = self._steps.get(step, {})
        state = edges.get(edge)
        if not isinstance(state, _Waiting):
            return []
        edges[edge] = None
        return [(state.waiter, error)]

    def finish(self, step: StepId) -> list[EndWait[Waiter, Value]]:
        """End the step here: drop its values, also later ones, and end waits that are left with StepCancelled."""
        edges = self._steps.get(step)
        if edges and any(edges.values()):
            return self.abort(step, StepCancelled(f"{describe(step)} has ended"))
        # The common case, with all values delivered.
        self._ended[step.origin].add(step.number)
        self._steps.pop(step, None)
        return []

    def abort(self, step: StepId, error: BaseException) -> list[EndWait[Waiter, Value]]:
        """Abort the step: its waits end with `error`; its values are dropped, including later ones."""
        self._ended[step.origin].add(step.number)
        edges = self._steps.pop(step, {}).values()
        self._dropped += sum(isinstance(state, _Held) for state in edges)
        return [(state.waiter, error) for state in edges if isinstance(state, _Waiting)]

    def stop_waiting_for(self, source: str, error: BaseException) -> list[EndWait[Waiter, Value]]:
        """End the present waits for values of `source` with `error`, since the values may be lost."""
        commands: list[EndWait[Waiter, Value]] = []
        for edges in self._steps.values():
            for edge, state in edges.items():
                if isinstance(state, _Waiting) and state.source == source:
                    edges[edge] = None
                    commands.append((state.waiter, error))
        return commands

    def lose(self, task: str, error: DflowError) -> list[EndWait[Waiter, Value]]:
        """Handle the loss of a task: abort its steps, and fail waits for its values until `welcome`.

        Forget the steps of the task that ended earlier, since a new task of that name may count from 0. Remember those
        that end now or before `welcome`: if the same task comes back, their values may still arrive.
        """
        commands = self.stop_waiting_for(task, error)
        if task not in self._lost:
            self._ended.pop(task, None)
        for step in [step for step in self._steps if step.origin == task]:
            commands += self.abort(step, error)
        self._lost[task] = error
        return commands

    def welcome(self, task: str) -> None:
        """Accept steps and values of a lost task, or of a new one of its name, again."""
        self._lost.pop(task, None)

    def is_lost(self, task: str) -> bool:
        """Whether a task has left, and no task of its name has come since."""
        return task in self._lost

    def open_steps(self, origin: str) -> tuple[StepId, ...]:
        """The steps of `origin` that have begun here or hold a value, and have not ended."""
        return tuple(step for step in self._steps if step.origin == origin)

    def waiters(self) -> list[Waiter]:
        """The waiters whose waits have not ended."""
        states = (state for edges in self._steps.values() for state in edges.values())
        return [state.waiter for state in states if isinstance(state, _Waiting)]

    def statistics(self) -> RendezvousStatistics:
        """Return the present contents and the counters."""
        return RendezvousStatistics(
            open_steps=len(self._steps),
            values=self._count(lambda state: isinstance(state, _Held)),
            waiters=self._count(lambda state: isinstance(state, _Waiting)),
            delivered=self._delivered,
            dropped=self._dropped,
            remembered=sum(len(ended.above) for ended in self._ended.values()),
        )

    def _has_ended(self, step: StepId) -> bool:
        ended = self._ended.get(step.origin)
        return ended is not None and (step.number < ended.low or step.number in ended.above)

    def _count(self, matches: Callable[[object], bool]) -> int:
        return sum(matches(state) for edges in self._steps.values() for state in edges.values())


def describe(step: StepId) -> str:
    """Describe the step in words, for errors."""
    return f"step {step.index} of {short_task_name(step.origin)}"
