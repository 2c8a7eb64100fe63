"""A task's parts of the cluster's snapshots, in a folder that only this task uses.

Why: a parameter task that was started again returns to its part, and the other tasks to theirs, so no task reads the
files of another, and no path travels. The coordinator decides (`recovery.py`). Invariants: a part is complete or absent
(`atomic_directory`); the newest committed part is removed only after a later one is committed.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from dflow.distributed.steps.plan_runs import PlanRuns
from dflow.distributed.task.step_aggregator import RunCopy, StepAggregator
from dflow.distributed.wire.messages.message import Notice
from dflow.distributed.wire.messages.snapshots import (
    CaptureState,
    LoadState,
    SnapshotCommitted,
    StateCaptured,
    StateLoaded,
    StateWritten,
)
from dflow.lowering.files.array_files import fill_folder, own_copy, read_arrays
from dflow.lowering.files.array_manifest import MANIFEST
from dflow.lowering.files.atomic_directory import whole_folder
from dflow.lowering.state.applied_steps import AppliedCall
from dflow.lowering.state.store import Store
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import CheckpointError, StepCancelled

LOGGER = logging.getLogger("dflow")

#: Keys of the record of applied steps, and of the runs of synchronous training, in the metadata of a part.
_APPLIED, _ROUNDS = "applied", "rounds"


class TaskSnapshots:
    """The parts of the task `task`, which holds `store`, in the folder `folder`; the methods are called one at a time.

    runs    its parts of steps, cancelled when it returns to a snapshot
    rounds  its runs of synchronous training
    folder  None if the task was started without one: it then reports that it cannot write
    tell    notifies the coordinator
    """

    def __init__(
        self,
        task: str,
        store: Store,
        runs: PlanRuns,
        rounds: StepAggregator,
        folder: Path | None,
        tell: Callable[[Notice], None],
    ) -> None:
        self._task, self._store, self._runs, self._rounds, self._tell = task, store, runs, rounds, tell
        self._folder = None if folder is None else folder / short_task_name(task).replace(":", "-")
        self._lock = threading.Lock()

    def handle(self, message: Notice) -> None:
        """Do what the coordinator asks for, and report it. Runs on a thread that may wait."""
        with self._lock:
            match message:
                case CaptureState(number):
                    self._report(lambda: self._write(number), lambda why: StateWritten(self._task, number, why))
                case LoadState(number, epoch):
                    self._report(lambda: self._load(number), lambda why: StateLoaded(self._task, epoch, why))
                case SnapshotCommitted(number):
                    self._remove_others(number)

    def _report(self, do: Callable[[], None], report: Callable[[str], Notice]) -> None:
        try:
            do()
        except Exception as error:  # any error: the coordinator waits for the outcome
            LOGGER.warning("%s: %s", short_task_name(self._task), error)
            self._tell(report(f"{type(error).__name__}: {error}"))
        else:
            self._tell(report(""))

    def _write(self, number: int) -> None:
        values = self._store.snapshot(self._store.keys())
        rest = {_APPLIED: self._store.applied.copy(), _ROUNDS: self._rounds.copy()}
        self._tell(StateCaptured(self._task, number))
        place = self._part(number)
        place.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(place, marker=MANIFEST, overwrite=True) as part:
            fill_folder(part, values, msgspec.to_builtins(rest, str_keys=True))

    def _part(self, number: int) -> Path:
        if self._folder is None:
            raise CheckpointError(
                f"{short_task_name(self._task)} has no folder for snapshots", "start it with --snapshots DIR"
            )
        return self._folder / str(number)

    def _load(self, number: int) -> None:
        files = read_arrays(self._part(number))
        applied = msgspec.convert(files.metadata.get(_APPLIED, []), tuple[AppliedCall, ...], strict=False)
        rounds = msgspec.convert(files.metadata.get(_ROUNDS, []), tuple[RunCopy, ...])
        here = {name: name for name in files.types if name in self._store}
        known = self._store.read_saved(files, here)
        new = {name: own_copy(value) for name, value in files.each({n: None for n in files.types if n not in here})}
        error = StepCancelled(f"{short_task_name(self._task)} returns to snapshot {number}")
        for step in self._runs.steps():
            self._runs.cancel(step, error)
        for name, value in new.items():
            self._store.create(name, files.types[name], lambda value=value: value)  # type: ignore[misc]
        self._store.replace(known)
        self._store.applied.return_to(applied)
        self._rounds.return_to(rounds)

    def _remove_others(self, number: int) -> None:
        """Remove the parts of earlier snapshots, and of later ones that were abandoned."""
        if self._folder is None or not (self._folder / str(number)).exists():
            return
        for part in self._folder.iterdir():
            if part.name.isdigit() and int(part.name) < number:
                shutil.rmtree(part, ignore_errors=True)
