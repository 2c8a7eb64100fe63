"""Invariants of the program `round-snapshots`, beside those of rounds and of snapshots.

By the names that a report gives them:
- `applied once`   each round is applied to a variable once, after all earlier ones, in its present history;
- `one moment`     in a committed snapshot and after a return to it, the aggregator and the saved accumulators have the
                   same rounds as the variables. Excepted is a round whose update failed before all workers left: its
                   record is in each part;
- `none lost`      a worker learns that a run is complete only if each variable has had all of its rounds. At the end
                   each has had them, unless lost state could not be restored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dflow.distributed.coordinator.coordinator_part import copies_of
from dflow.distributed.snapshots.resumption import Snapshot
from dflow.distributed.snapshots.snapshot_messages import CaptureState, StateRestored
from dflow.distributed.synchronous.step_aggregator import RunCopy, StepAggregator
from dflow.distributed.task.task_resources import SavedResource
from dflow.distributed.task.task_server import TaskStatistics
from dflow.distributed.training.run_progress import RunProgress
from dflow.distributed.wire.messages.message import Message, Notice
from tests.distributed.task_parts import part_of
from tests.simulation.snapshot_checks import SnapshotChecks, names_on
from tests.simulation.steps_program import RUN
from tests.simulation.tasks import Member


def tally_on(host: str) -> str:
    """Return the name of a ps task's saved accumulator; the update of each round adds its number to it."""
    return f"tally of {host}"


class RoundSnapshotChecks(SnapshotChecks):
    """The checks of one schedule."""

    def __init__(self, ps: Sequence[str], rounds: int) -> None:
        super().__init__(ps, rounds)
        #: The variables that have had all rounds.
        self._full: set[str] = set()
        self._is_refused = False
        #: Rounds that perhaps some tasks only had in a snapshot, and the snapshots that must not have such a round.
        self._halves: set[int] = set()
        self._whole: set[int] = set()

    def notified(self, member: Member, notice: Notice) -> None:
        """A task is about to capture its part of a snapshot, or to do something else with one."""
        run = part_of(member.server, StepAggregator)._runs.get(RUN)
        if isinstance(notice, CaptureState) and run is not None and run._rounds.taking_part:
            self._whole.add(notice.number)

    def may_differ(self) -> Collection[int]:
        """Return the rounds that a snapshot may have on some tasks only."""
        return self._halves

    def changes(self, process: str, name: str, value: Any, rounds: Collection[int]) -> int:
        """A process is about to apply a sum of gradients of these rounds to a variable of this value."""
        self.read(process, name, value)
        first, counts = min(rounds), value[:-1]
        is_next = len(rounds) == 1 and np.array_equal(counts, np.arange(self._steps) < first)
        self.require(is_next, "applied once", f"{process} applies rounds {rounds} to {name!r}, which has {counts}")
        if first == self._steps - 1:
            self._full.add(name)
        return first

    def rounds_done(self) -> int:
        """Return the number of rounds that the variables have."""
        return max((int(np.count_nonzero(value[:-1])) for value in self.present().values()), default=0)

    def complete(self, worker: str) -> None:
        """A worker learns that the run is complete."""
        text = f"{worker} learns that the run is complete, and"
        self._require_full(text)

    def _require_full(self, text: str) -> None:
        missing = sorted({name for host in self._tasks for name in names_on(host)} - self._full)
        self.require(not missing, "none lost", f"{text} {missing} had fewer than {self._steps} rounds")

    def refused(self, why: str) -> None:
        """The coordinator refuses to restore lost state."""
        self._is_refused = self._is_refused or "the lost state is not restored: " in why
        super().refused(why)

    def done_in(self, snapshot: Snapshot) -> Sequence[int]:
        """Return the rounds that a snapshot counts as done."""
        done, _ = next(copies_of(RunProgress, snapshot.copies)).rounds.get(RUN, (0, 0))
        return range(done)

    def committed_part(self, number: int, text: str, metadata: Mapping[str, Any], values: dict[str, Any]) -> None:
        """Check the records in a part of the committed snapshot `number`; leave only variables in `values`."""
        arrays = {name: values.pop(name) for name in [*values] if "\0" in name}
        for run in msgspec.convert(metadata["rounds"], tuple[RunCopy, ...]):
            text_of_run = f"{text} has {run}, and {values}"
            if run.is_half_done:
                self._halves.add(run.done)
                self.require(number not in self._whole, "one moment", f"{text_of_run}, and workers take part")
            counts = (int(np.count_nonzero(value[:-1])) for value in values.values())
            is_same = all(run.done <= count <= run.done + run.is_half_done for count in counts)
            self.require(is_same, "one moment", text_of_run)
        for saved in msgspec.convert(metadata["resources"], tuple[SavedResource, ...], strict=False):
            sums = [arrays[saved.array_name(array)] for array in saved.arrays]
            self._check_tally(text, saved.created.name, sums, values)

    def _check_tally(self, when: str, name: str, sums: Sequence[Any], values: Mapping[str, Any]) -> None:
        rounds = sums[0][:-1] > 0 if sums else np.zeros(self._steps, bool)
        whole = [number for number in range(self._steps) if number not in self._halves]
        is_same = all(np.array_equal(rounds[whole], value[whole] > 0) for value in values.values())
        text = f"{when} {name!r} has rounds {np.flatnonzero(rounds)}, and the variables are {values}"
        self.require(is_same, "one moment", text)

    def _check_present_tallies(self, when: str) -> None:
        present = self.present()
        for host in self._tasks:
            values = {name: value for name, value in present.items() if name in names_on(host)}
            member = self.tasks.member(host)
            if member is not None and values and self.tasks.resource(host, tally_on(host)) is not None:
                *_, sums = member.server.resources.accumulator(tally_on(host)).contents()
                self._check_tally(when, tally_on(host), sums, values)

    def tells(self, message: Message) -> None:
        """The coordinator is about to send a message to a task."""
        super().tells(message)
        if isinstance(message, StateRestored):
            self._check_present_tallies("after a return")

    def end(self, statistics: Mapping[str, TaskStatistics]) -> None:
        """Check the final state: no event is pending."""
        super().end(statistics)
        if not self.state._directory.lost():
            self._check_present_tallies("at the end")
        if not self._is_refused:
            self._require_full("at the end")
