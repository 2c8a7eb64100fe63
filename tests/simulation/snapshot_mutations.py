"""Faults planted in the code of snapshots and of returns to them; see `mutations`, which finds them."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from dflow.distributed.asynchronous import claimed_run, step_claims
from dflow.distributed.coordinator import variable_directory
from dflow.distributed.snapshots import cluster_snapshots, recovery, task_snapshots
from dflow.distributed.snapshots.snapshot_messages import CaptureState, StateCaptured
from dflow.distributed.steps import retries, step_gate
from dflow.lowering.state import applied_steps
from tests.simulation.blocking_program import CURRENT
from tests.simulation.planting import Mutation, doing_nothing, giving
from tests.simulation.programs import SNAPSHOTS

#: A worker's step is applied on one task only, and the worker dies.
_HALF = "cut=worker:0/ps:1@2.3+8,kill=worker:0@3.5+5"

#: A ps task dies in the middle of the run, once or twice, or with a worker; or when another one's disk is full.
_TWICE, _BOTH = "kill=ps:0@3+0.5,kill=ps:0@6+0.5", "kill=ps:0@3+0.5,kill=worker:1@3.2+0.5"
_DIES, _FULL = "kill=ps:0@3+0.5", "full=ps:1@2.5+9,kill=ps:0@4.5+0.5"

#: A ps task dies before the first snapshot is complete, which no disk takes.
_EARLY = "full=ps:1@0+5,kill=ps:0@1.2+0.5"

#: A ps task dies as a worker's second plan is registered.
_AT_ONCE = "at=registration*2/ps:0+0.7"

#: Steps take longer than their deadline.
_LOSSES = "loss=0.3,mixed=0.3,breaks=0.2"

_RECOVERY, _ATTEMPT = recovery.Recovery, cluster_snapshots.SnapshotAttempt
_SNAPSHOTS = cluster_snapshots.ClusterSnapshots
_PARTS = task_snapshots.TaskSnapshots
_DIRECTORY = variable_directory.VariableDirectory
_CLAIMS = step_claims.StepClaims
_APPLIED = applied_steps.AppliedSteps
_RUN = claimed_run.ClaimedRun


def _no_part_awaited(original: Any) -> Any:
    def captured(self: Any, report: Any) -> None:
        original(self, report)
        self.unwritten.clear()

    return captured


def _no_capture_awaited(original: Any) -> Any:
    def captured(self: Any, report: Any) -> None:
        original(self, report)
        self.uncaptured.clear()
        self.names.update(self.snapshot.names)

    return captured


def _ledger_of_the_commit(original: Any) -> Any:
    def commit(self: Any, at_s: float) -> Any:
        self._attempt.snapshot = msgspec.structs.replace(self._attempt.snapshot, copies=self._core.copies())
        return original(self, at_s)

    return commit


def _only_the_first(original: Any) -> Any:
    def load(self: Any, tasks: Any) -> Any:
        if self.phase is not recovery.ReturnPhase.SETTING:
            return original(self, tasks)
        self._left.intersection_update([*tasks][:1])
        return original(self, [*tasks][:1])

    return load


def _the_newest(original: Any) -> Any:
    def load(self: Any, tasks: Any) -> Any:
        snapshots = self._snapshots
        committed = snapshots.committed
        snapshots.committed = msgspec.structs.replace(committed, number=snapshots.counted.number)
        commands = original(self, tasks)
        snapshots.committed = committed
        return commands

    return load


def _none_freed(original: Any) -> Any:
    return lambda parts, message: original(parts, msgspec.structs.replace(message, unsaved=()))


def _without_reading(original: Any) -> Any:
    def load(self: Any, tasks: Any) -> Any:
        self.phase = recovery.ReturnPhase.SETTING
        return original(self, tasks)

    return load


def _bound_to_the_next_process(original: Any) -> Any:
    def joined(self: Any, task: str) -> None:
        original(self, task)
        for name, placement in list(self._placements.items()):
            if placement.info.task == task:
                self._bind(name, placement)

    return joined


def _claims_kept(original: Any) -> Any:
    def return_to(run: Any, copy: Any) -> None:
        run.workers, workers = {}, run.workers
        original(run, copy)
        run.workers = workers

    return return_to


def _without_failures(original: Any) -> Any:
    return lambda run, report: original(run, msgspec.structs.replace(report, has_failed=False))


def _idle_at_once(original: Any) -> Any:
    def close(gate: Any, on_idle: Any) -> None:
        original(gate, on_idle)
        on_idle()

    return close


def _captured_after_the_report(original: Any) -> Any:
    def write(parts: Any, message: CaptureState) -> Any:
        parts._tell(StateCaptured(parts._task, message.number, parts._store.keys()))
        CURRENT.get().sleep(0.7)
        return original(parts, message)

    return write


def _successful(original: Any) -> Any:
    return lambda self, report, at_s: original(self, msgspec.structs.replace(report, failure=""), at_s)


def _always_the_first(original: Any) -> Any:
    return lambda parts, message: original(parts, msgspec.structs.replace(message, epoch=1))


def _removed_before_the_commit(original: Any) -> Any:
    return lambda parts, message: original(parts, msgspec.structs.replace(message, committed=0))


_planted = partial(Mutation, program=SNAPSHOTS)


SNAPSHOT_MUTATIONS = (
    _planted("a snapshot is committed before it is written", _ATTEMPT, "captured", _no_part_awaited, "one moment"),
    _planted(
        "the pause ends before all have captured", _ATTEMPT, "captured", _no_capture_awaited, "one moment", "late=0.3"
    ),
    _planted("a snapshot has a later ledger", _SNAPSHOTS, "_commit", _ledger_of_the_commit, "one moment"),
    _planted("one task alone returns", _RECOVERY, "_load", _only_the_first, "one moment", _DIES),
    _planted("a snapshot that is not committed is loaded", _RECOVERY, "_load", _the_newest, "none lost", _FULL),
    _planted("a part that failed counts as written", _SNAPSHOTS, "_take_written", _successful, "one moment", _FULL),
    _planted("a task returns once only", _PARTS, "_load", _always_the_first, "one moment", _TWICE),
    _planted("a task returns before others have read", _RECOVERY, "_load", _without_reading, "all read"),
    _planted("state made since is not freed", _PARTS, "_load", _none_freed, "one moment", _EARLY),
    _planted("the ledger does not return", _CLAIMS, "return_to", giving(0), "one moment"),
    _planted("claims outlive a return", _RUN, "return_to", _claims_kept, "done once"),
    _planted("a dead worker's step is not awaited", _CLAIMS, "is_clear", giving(True), "one moment", _HALF),
    _planted("a failed step is not done first", _RUN, "note_done", _without_failures, "one moment", _LOSSES),
    _planted("a step waits for a return", retries, "is_in_step", giving(False), "no cycle", _AT_ONCE),
    _planted("a step that runs is not awaited", step_gate.StepGate, "close", _idle_at_once, "one moment"),
    _planted("a lost variable is made again", _DIRECTORY, "joined", _bound_to_the_next_process, "same variable", _BOTH),
    _planted("a task captures after its report", _PARTS, "_write", _captured_after_the_report, "one moment"),
    _planted(
        "a part goes before the next is committed", _PARTS, "_write", _removed_before_the_commit, "none lost", _FULL
    ),
    _planted("a part has no applied steps", _APPLIED, "copy", giving(applied_steps.AppliedCopy()), "applied once"),
    _planted("applied steps do not return", _APPLIED, "return_to", doing_nothing, "none lost", _DIES),
)
