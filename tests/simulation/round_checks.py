"""Invariants of the rounds of `Sync`, checked in the programs that run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflow.distributed.synchronous.round_messages import RoundOpen
from dflow.distributed.wire.messages.roster import Roster
from tests.simulation.checks import Require

#: Length of a gradient: more than the gradients of a schedule.
PLACES = 2048


@dataclass
class _Gradient:
    """A worker's gradient for one opening; `is_fresh` is the accumulator's answer, None until the worker has it.

    `done`  number of rounds done before the opening
    `sums`  number of sums that contain it
    `may_go`  whether no worker was left to take part before its sum was taken
    """

    number: int
    worker: str
    run: str
    opening: int
    done: int
    is_fresh: bool | None = None
    sums: int = 0
    may_go: bool = False


@dataclass
class _RunSeen:
    """One run in these lives of its tasks.

    `before`   number of rounds done when it was opened
    `sums`     the numbers of the gradients in the sum of each opening
    `updates`  the openings whose sums each task applied, in order
    """

    rounds: int
    wanted: int
    before: int = 0
    sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    updates: dict[str, list[int]] = field(default_factory=dict)
    #: Workers that got an opening and never left, with the number of the first one, and workers that left (they may
    #: have returned, or not be missed yet).
    takes_part: dict[str, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)


class RoundChecks:
    """The invariants of rounds; `require` records a violation.

    - `counted once`   a gradient is in at most one sum, once, that of its opening, and its worker knows whether it is;
    - `first m`        a sum has at most the wanted number of gradients, and fewer only if fewer workers take part;
    - `applied once`   each task applies the sums of a run once, in order;
    - `later rounds`   a worker that has completed an opening gets a later one;
    - `the dead`       no worker waits for a worker that left before the wait began, or when all workers have given;
    - `none lost`      if a run is reported complete, all tasks have applied all of its rounds; any other opening is one
                       whose update failed, which some tasks may have applied.
    """

    def __init__(self, require: Require, tasks: Sequence[str]) -> None:
        self._require, self._tasks = require, tasks
        #: The tasks that have left according to the host, and since when.
        self._gone: dict[str, float] = {}
        self._gradients: list[_Gradient] = []
        self._runs: dict[str, _RunSeen] = {}

    def opened(self, run: str, rounds: int, wanted: int, before: int) -> None:
        """A worker opens a run of `rounds` rounds with `wanted` gradients each; `before` rounds are done."""
        self._runs.setdefault(run, _RunSeen(rounds, wanted, before))

    def gives(self, worker: str, run: str, opening: RoundOpen) -> _Gradient:
        """A worker is about to give a gradient."""
        gradient = _Gradient(len(self._gradients), worker, run, opening.number, opening.done)
        self._gradients.append(gradient)
        return gradient

    def told(self, run: str, worker: str, done: int, opening: RoundOpen) -> None:
        """The host has answered a worker that completed one opening with another."""
        seen, number = self._runs[run], opening.number
        text = f"{worker} has completed opening {done} of {run} and gets {number}"
        self._require(number > done or opening.done >= seen.rounds, "later rounds", text)
        if worker not in seen.left:
            seen.takes_part.setdefault(worker, number)
        text = f"{worker} gets opening {number} of {run} after {opening.done} rounds, and there were"
        # Until the run is over, more openings may follow while the answer is on its way.
        sums = seen.before + len(seen.sums)
        most = seen.before + number if opening.done >= seen.rounds else sums
        self._require(opening.done <= sums <= most, "none lost", f"{text} {sums} sums")
        for task in self._tasks:
            applied = seen.before + len(seen.updates.get(task, ()))
            self._require(opening.done <= applied <= most, "none lost", f"{text} {applied} updates of {task}")

    def overdue(self, run: str, worker: str, done: int, error: str, asked_s: float, *, is_updating: bool) -> None:
        """A worker's wait for the next opening has timed out at the host, whose error names the missing workers.

        is_updating  whether the host applies a sum, or waits with it for the end of a pause
        """
        is_vain = done not in self._runs[run].sums and "and none did not" in error and not is_updating
        self._require(not is_vain, "the dead", f"all have given, and {worker} waits: {error}")
        _, _, missing = error.partition("gave one and ")
        for name, since_s in self._gone.items():
            text = f"{worker} has waited since {asked_s:.1f} s for {name}, which is gone since {since_s:.1f} s: {error}"
            self._require(since_s > asked_s or name not in missing, "the dead", text)

    def sees(self, roster: Roster, now_s: float) -> None:
        """The host receives a roster."""
        live = {info.task for info in roster.tasks if info.left_at_s is None}
        gone = {info.task for info in roster.tasks} - live
        self._gone = {task: self._gone.get(task, now_s) for task in gone}
        for info in roster.tasks:
            if info.left_at_s is not None:
                self.leaves(info.task)

    def leaves(self, worker: str) -> None:
        """A worker has died, left or been removed, or announces that it leaves."""
        for run, seen in self._runs.items():
            seen.takes_part.pop(worker, None)
            seen.left.add(worker)
            if not seen.takes_part:
                # The host frees a run that has no worker, with the gradients whose workers have not ended their step.
                for gradient in self._gradients:
                    gradient.may_go |= gradient.run == run and gradient.opening not in seen.sums

    def summed(self, run: str, total: Any) -> None:
        """The host has taken a sum from the accumulator, and is about to apply it."""
        seen, total = self._runs[run], np.asarray(total)
        numbers = _places(total)
        number = self._gradients[numbers[0]].opening
        self._require(number not in seen.sums, "counted once", f"opening {number} of {run} has a second sum")
        for place in numbers:
            gradient = self._gradients[place]
            gradient.sums += 1
            text = f"the gradient of {gradient.worker} for opening {gradient.opening} of {gradient.run}"
            self._require(gradient.sums == 1, "counted once", f"{text} is in a second sum")
            self._require(total[place] == 1, "counted once", f"{text} is in a sum {total[place]} times")
            is_of_it = (gradient.run, gradient.opening) == (run, number)
            self._require(is_of_it, "counted once", f"{text} is in the sum of opening {number} of {run}")
            self._require(gradient.is_fresh is not False, "counted once", f"{text} is in its sum and was called stale")
        text = f"opening {number} of {run} has {len(numbers)} gradients, {seen.wanted} are wanted"
        self._require(len(numbers) <= seen.wanted, "first m", text)
        # The sum may have been taken before a worker got this opening, and have waited for the end of a pause.
        expected = sorted(worker for worker, first in seen.takes_part.items() if first < number)
        least = max(1, min(seen.wanted, len(expected)))
        self._require(len(numbers) >= least, "first m", f"{text}, and {expected} take part")
        seen.sums[number] = numbers

    def rounds_in(self, total: Any) -> set[int]:
        """Return the rounds, counted from 0, of the gradients in a sum."""
        return {self._gradients[place].done for place in _places(total)}

    def updated(self, run: str, task: str, total: Any) -> None:
        """A task applies a sum."""
        seen, numbers = self._runs[run], _places(total)
        updates, number = seen.updates.setdefault(task, []), self._gradients[numbers[0]].opening
        text = f"{task} applies a sum of {numbers} of opening {number} of {run} after those of {updates}"
        is_next = seen.sums.get(number) == numbers and number > (updates[-1] if updates else -1)
        self._require(is_next, "applied once", text)
        updates.append(number)

    def end(self) -> None:
        """Check the final state: no event is pending."""
        for gradient in self._gradients:
            sums = self._runs[gradient.run].sums
            text = f"the gradient of {gradient.worker} for opening {gradient.opening} of {gradient.run}"
            is_there = gradient.sums == 1 or gradient.opening not in sums or not gradient.is_fresh or gradient.may_go
            self._require(is_there, "counted once", f"{text} was called fresh and is in no sum")


def _places(total: Any) -> tuple[int, ...]:
    """Return the numbers of the gradients in a sum."""
    return tuple(int(number) for number in np.nonzero(np.asarray(total))[0])
