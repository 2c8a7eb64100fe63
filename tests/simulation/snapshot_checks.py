"""Invariants of variables in snapshots, checked in the programs `snapshots` and `round-snapshots`.

By the names that a report gives them:
- `applied once`   a step or round is applied to a variable at most once in its present history;
- `one moment`     the variables of all tasks have the same steps, among them all that the ledger counts as done: in a
                   committed snapshot, after a return to it, and at the end. Excepted is a step that is not done and
                   was left by a worker when no other took part in the run: its record is in each part;
- `none lost`      a step that is counted as done is applied to each variable. Lost state is restored, or made again
                   from the beginning, unless the schedule damaged a part of the newest snapshot;
- `same variable`  no value is read or changed that began with another initial value than the variable did first, since
                   a return has freed it;
- `no cycle`       no worker waits for a return within a step, for whose end the return waits;
- `all read`       no task sets the state of a snapshot before each has read its part;
- `bounded`        at the end a task's folder has at most three parts.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dflow.distributed.asynchronous.step_claims import StepClaims
from dflow.distributed.coordinator.coordinator_part import copies_of
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.snapshots.cluster_snapshots import ClusterSnapshots
from dflow.distributed.snapshots.recovery import Recovery, ReturnPhase
from dflow.distributed.snapshots.resumption import Snapshot
from dflow.distributed.snapshots.snapshot_messages import (
    CaptureState,
    LoadState,
    SnapshotCommitted,
    StateLoaded,
    StateRestored,
)
from dflow.distributed.task.task_server import TaskStatistics
from dflow.distributed.training.work_messages import ClaimSteps, RoundsDone, StepsDone
from dflow.distributed.wire.messages.message import Message
from dflow.lowering.files.changed_rows import read_changed_arrays
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import CheckpointError
from tests.simulation.checks import Attempt, Checks
from tests.simulation.simulated_disks import SimulatedDisks
from tests.simulation.steps_program import RUN
from tests.simulation.tasks import SimulatedTasks

Values = Mapping[str, Any]


def names_on(host: str) -> tuple[str, str]:
    """Return the names of the variables of a ps task."""
    return f"first of {host}", f"second of {host}"


class SnapshotChecks(Checks, ABC):
    """The checks of one schedule. A subclass knows which of the `steps` steps or rounds a snapshot counts as done."""

    def __init__(self, ps: Sequence[str], steps: int) -> None:
        super().__init__(ps, steps)
        #: Set by the schedule's run, which makes them after this.
        self.state: CoordinatorState
        self.tasks: SimulatedTasks
        self.disks: SimulatedDisks
        self._creations = itertools.count(1)
        #: The number at the end of each variable, which its first user has seen.
        self._created: dict[str, int] = {}
        #: The names that the return frees which tasks carry out.
        self._freed: tuple[str, ...] = ()
        #: The values in each committed snapshot, without damaged parts.
        self._committed: dict[int, Values] = {}
        #: The tasks that have read their parts for each return.
        self._have_read: dict[int, set[str]] = {}

    # Variables.

    def initial(self, length: int) -> Any:
        """Return an initial value that is different from all others."""
        value = np.zeros(length, np.int32)
        value[-1] = next(self._creations)
        return value

    def read(self, who: str, name: str, value: Any) -> None:
        """A task reads or changes a variable, or loads it."""
        first = self._created.setdefault(name, int(value[-1]))
        text = f"{who} has {name!r} of creation {value[-1]}, and the first one used was of creation {first}"
        self.require(first == value[-1], "same variable", text)

    @abstractmethod
    def done_in(self, snapshot: Snapshot) -> Sequence[int]:
        """Return the steps or rounds that a snapshot counts as done."""

    def may_differ(self) -> Collection[int]:
        """Return the steps that a snapshot may have on some tasks only."""
        return ()

    def refused(self, why: str) -> None:
        """The coordinator refuses to restore lost state."""
        committed = self.state.core.part(ClusterSnapshots).committed
        if "the lost state is not restored: " not in why:
            return  # the worker has left
        is_damaged = any((short_task_name(task), committed.number) in self.disks.damaged for task in committed.tasks)
        self.require(is_damaged and " could not return to the snapshot" in why, "none lost", why)

    # Messages.

    def tells(self, message: Message) -> None:
        """The coordinator is about to send a message to a task."""
        committed = self.state.core.part(ClusterSnapshots).committed
        if isinstance(message, SnapshotCommitted) and message.number not in self._committed:
            self._check_commit()
        elif isinstance(message, StateRestored):
            self._check_one_moment(f"after the return to snapshot {committed.number}", self.present())
            self._check_same_as(committed.number)
        elif isinstance(message, LoadState) and message.is_set:
            self._freed = message.unsaved
            missing = {*committed.tasks} - self._have_read.get(message.epoch, set())
            text = f"return {message.epoch} is carried out, and {sorted(missing)} have not read their parts"
            self.require(not missing, "all read", text)

    def hears(self, message: Message) -> None:
        """The coordinator is about to handle a message of a task."""
        if isinstance(message, StateLoaded) and message.is_set and not message.failure:
            for name in {*names_on(short_task_name(message.task))}.intersection(self._freed):
                self._created.pop(name, None)
        if isinstance(message, StateLoaded) and not message.failure:
            self._have_read.setdefault(message.epoch, set()).add(message.task)

    def has_heard(self, message: Message) -> None:
        """The coordinator has handled a message of a task: check steps that it counts as done."""
        recovery = self.state.core.part(Recovery)
        if (
            not isinstance(message, ClaimSteps | StepsDone | RoundsDone)
            or recovery.is_returning
            or self.state._directory.lost()
        ):
            return
        for name, value in self.present().items():
            self.read("a task", name, value)
            missing = [step for step in self._done_steps() if value[step] == 0]
            self.require(not missing, "none lost", f"steps {missing} count as done, and {name!r} does not have them")

    def _check_commit(self) -> None:
        committed, found = self.state.core.part(ClusterSnapshots).committed, dict[str, Any]()
        for task in committed.tasks:
            host = short_task_name(task)
            if (host, committed.number) in self.disks.damaged:
                continue
            text = f"snapshot {committed.number} is committed, and the part of {host}"
            try:
                files = read_changed_arrays(self.disks.part(host, committed.number))
                values = {name: np.array(value) for name, value in files.each(dict.fromkeys(files.types))}
                self.committed_part(committed.number, text, files.metadata, values)
            except CheckpointError as error:
                self.require(False, "one moment", f"{text} cannot be read: {error}")
                continue
            missing = {name for name in committed.names if name in names_on(host)} - {*values}
            self.require(not missing, "one moment", f"{text} has no {sorted(missing)}")
            found |= values
        self._committed[committed.number] = found
        self._check_one_moment(f"in snapshot {committed.number}", found, self.done_in(committed))

    def committed_part(self, number: int, text: str, metadata: Mapping[str, Any], values: dict[str, Any]) -> None:
        """Check the records in a part of the committed snapshot `number`; leave only variables in `values`."""

    def _check_same_as(self, number: int) -> None:
        present = self.present()
        for name, value in self._committed.get(number, {}).items():
            text = f"after the return to snapshot {number} {name!r} is {present.get(name)}, and it has {value}"
            self.require(name not in present or np.array_equal(present[name], value), "one moment", text)

    def _check_one_moment(self, when: str, values: Values, done: Sequence[int] | None = None) -> None:
        done = self._done_steps() if done is None else done
        first = next(iter(values), "")
        whole = [step for step in range(self._steps) if step in done or step not in self.may_differ()]
        for name, value in values.items():
            self.read(when, name, value)
            text = f"{when} {name!r} is {value[:-1]}, and {first!r} is {values[first][:-1]}"
            self.require(np.array_equal(value[whole], values[first][whole]), "one moment", text)
            missing = [step for step in done if value[step] != 1]
            self.require(not missing, "one moment", f"{when} steps {missing} are done, and {name!r} is {value[:-1]}")

    def present(self) -> Values:
        """Return the variables of the processes that hold them, as far as these are alive."""
        found: dict[str, Any] = {}
        for info in self.state._directory.variables():
            member = self.tasks.member(short_task_name(info.task))
            is_there = member is not None and str(member.process) == info.process and info.kind == "variable"
            if member is not None and is_there and info.name in member.server.store:
                found[info.name] = np.array(member.server.store.read_together([info.name])[info.name])
        return found

    def _done_steps(self) -> Sequence[int]:
        """Return the steps that the ledger counts as done."""
        return self.done_in(Snapshot(0, (), (), 0.0, (), "", self.state.core.copies()))

    # The end.

    def is_settled(self) -> bool:
        """Whether the coordinator knows the processes of all ps tasks, and has restored lost state or given it up."""
        recovery, members = self.state.core.part(Recovery), self.state._members
        for host in self._tasks:
            member = self.tasks.member(host)
            if member is None or members.process(member.name) != str(member.process):
                return False
        return not recovery.is_returning and (
            not self.state._directory.lost() or recovery.phase is ReturnPhase.HOPELESS
        )

    def end(self, statistics: Mapping[str, TaskStatistics]) -> None:
        """Check the final state: all steps have ended, and no event is pending."""
        self.check_nothing_left(statistics)
        self.require(self.is_settled(), "waits end", "lost state is neither restored nor abandoned at the end")
        for host in self._tasks:
            parts = sorted(part.name for part in self.disks.part(host, 0).parent.iterdir())
            self.require(len(parts) <= 3, "bounded", f"{host} keeps {parts}")
        if self.state._directory.lost():
            self.refused(f"the lost state is not restored: {self.state.core.part(Recovery).why}")
        else:
            self._check_one_moment("at the end", self.present())


class StepSnapshotChecks(SnapshotChecks):
    """The checks of one schedule of the program `snapshots`."""

    def __init__(self, ps: Sequence[str], steps: int) -> None:
        super().__init__(ps, steps)
        #: Steps that were perhaps applied on some tasks only when a snapshot was captured, and no worker took part.
        self._halves: set[int] = set()

    def changes(self, process: str, name: str, value: Any, number: int) -> Attempt:
        """A process is about to apply an attempt to a variable of this value."""
        attempt = self._attempts[number]
        self.read(process, name, value)
        text = f"{process} applies step {attempt.step} of {attempt.worker} to {name!r}, which has it"
        self.require(value[attempt.step] == 0, "applied once", text)
        return attempt

    def done_in(self, snapshot: Snapshot) -> Sequence[int]:
        """Return the steps that a snapshot counts as done."""
        runs = next(copies_of(StepClaims, snapshot.copies)).runs
        pool = runs[RUN].pool if RUN in runs else ((0, self._steps),)
        return sorted({*range(self._steps)} - {step for pair in pool for step in range(*pair)})

    def may_differ(self) -> Collection[int]:
        """Return the steps that a snapshot may have on some tasks only."""
        return self._halves

    def claimed(self, worker: str, steps: range, live: Collection[str]) -> None:
        """See `Checks`; a claim from before a return is void."""
        void = {task for task, one in self.state.core.part(StepClaims)._runs[RUN].workers.items() if one.is_void}
        self._held = {task: held for task, held in self._held.items() if task not in void}
        super().claimed(worker, steps, live)

    def tells(self, message: Message) -> None:
        """The coordinator is about to send a message to a task."""
        run = self.state.core.part(StepClaims)._runs.get(RUN)
        if isinstance(message, CaptureState) and run is not None and not run.holding | run.sharing:
            self._halves.update(*run.left_over.ranges())
        super().tells(message)
