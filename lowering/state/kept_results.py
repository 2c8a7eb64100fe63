"""The results of the changes that a run's newest steps made on this task, for later attempts at these steps.

Why: a step may take an element of a queue here and then fail on another task. The next attempt must get the same
element, or it is lost. The results are kept until the process that did the step begins another step of the run on this
task: a process runs one step at a time, so the first step has ended on all tasks. A later attempt at an ended step is
refused, since nothing of it is left to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from dflow.lowering.values.index_set import IndexSet

#: Most bytes of the results of a program that are kept; larger ones are computed again. Elements are always kept.
MOST_KEPT = 1 << 24


class StepChange(NamedTuple):
    """A change in a step: the number of the call, the key of the state, and its number among the changes of that."""

    call: int
    key: str
    number: int


class KeptStep(msgspec.Struct, frozen=True):
    """The results of a step, to be written: its owner, and the number of arrays of each change."""

    number: int
    owner: str
    changes: tuple[tuple[StepChange, int], ...]


class KeptRun(msgspec.Struct, frozen=True):
    """The record of a run, to be written: the ranges of `RunResults.ended`, and the steps with results."""

    run: str
    ended: tuple[tuple[int, int], ...]
    steps: tuple[KeptStep, ...]

    @property
    def arrays(self) -> int:
        """Number of arrays of all results."""
        return sum(count for step in self.steps for _, count in step.changes)


class RunResults:
    """The results of one run. Its owner holds a lock around each call.

    `ended`  the steps with results that have ended on all tasks
    """

    def __init__(self) -> None:
        self.ended = IndexSet()
        #: The results of the changes of each step, and its owner, by its number.
        self._steps: dict[int, dict[StepChange, Sequence[Any]]] = {}
        self._owners: dict[int, str] = {}
        #: The numbers of the steps with results, by owner.
        self._owned: dict[str, set[int]] = {}

    def begins(self, number: int, owner: str, unfinished: Collection[int], *, is_ordered: bool = False) -> None:
        """Note that `owner` changes state in step `number`: its other steps have ended, but the `unfinished` ones.

        is_ordered  whether the processes of one task do the steps in order, so that earlier ones of others have ended
        """
        for other in [one for one in self._owned if one != owner] if is_ordered else ():
            self._end(other, {one for one in self._owned[other] if one < number})
        owned = self._owned.get(owner)
        if owned:
            self._end(owner, owned - {number, *unfinished})
        before = self._owners.get(number)
        if before is not None and before != owner:
            self._owned[before].discard(number)
            self._own(number, owner)

    def end_all(self, owner: str, unfinished: Collection[int]) -> None:
        """Note that all steps of `owner` have ended, but the `unfinished` ones."""
        self._end(owner, self._owned.get(owner, set()) - {*unfinished})

    def _end(self, owner: str, numbers: Iterable[int]) -> None:
        for number in [*numbers]:
            self._owned[owner].discard(number)
            del self._steps[number], self._owners[number]
            self.ended.add(range(number, number + 1))
        if owner in self._owned and not self._owned[owner]:
            del self._owned[owner]

    def _own(self, number: int, owner: str) -> None:
        self._owners[number] = owner
        self._owned.setdefault(owner, set()).add(number)

    def keep(self, number: int, owner: str, change: StepChange, results: Sequence[Any]) -> None:
        """Keep the results of a change in a step."""
        if number not in self._steps:
            # No Python call between the two, as an interrupt may come there: each step has an owner.
            self._owners[number] = owner
            self._steps[number] = {}
            self._own(number, owner)
        self._steps[number][change] = results

    def get(self, number: int, change: StepChange) -> Sequence[Any] | None:
        """Return the results of a change; None if they are not kept."""
        results = self._steps.get(number)
        return None if results is None else results.get(change)

    def copy(self, run: str, arrays: list[Any]) -> KeptRun:
        """Return a copy of the record; add its arrays to `arrays`, in order."""
        steps = []
        for number, results in self._steps.items():
            sizes = tuple((one, len(found)) for one, found in results.items())
            steps.append(KeptStep(number, self._owners[number], sizes))
            arrays += (array for found in results.values() for array in found)
        return KeptRun(run, self.ended.pairs(), tuple(steps))

    @staticmethod
    def of(copy: KeptRun, arrays: Iterable[Any]) -> RunResults:
        """Return a record equal to the one copied; take its arrays from `arrays`."""
        found, rest = RunResults(), iter(arrays)
        found.ended = IndexSet.of(copy.ended)
        for step in copy.steps:
            for change, count in step.changes:
                found.keep(step.number, step.owner, StepChange(*change), tuple(next(rest) for _ in range(count)))
        return found
