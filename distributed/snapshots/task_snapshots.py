"""A task's parts of the cluster's snapshots, in a folder that only this task uses.

Why: a parameter task that was started again returns to its part, and the other tasks to theirs, so no task reads the
files of another, and no path travels. The coordinator decides (`cluster_snapshots.py`, `recovery.py`). Invariants: a
part is complete or absent (`atomic_directory`), and needs no other part, also if only changed rows were written
(`changed_rows`); the newest committed part is removed only after a later one is committed.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dflow.distributed.client.session_driver import SessionDriver
from dflow.distributed.snapshots.pause_messages import HoldSteps, StepsHeld
from dflow.distributed.snapshots.snapshot_messages import (
    CaptureState,
    LoadState,
    SnapshotCommitted,
    StateCaptured,
    StateLoaded,
    StateWritten,
)
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_resources import SavedResource
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.wire.messages.message import Notice
from dflow.lowering.files.array_manifest import MANIFEST
from dflow.lowering.files.atomic_directory import tidy_all, whole_folder
from dflow.lowering.files.changed_rows import ChangedArrays, WrittenBytes, fill_with_changes, read_changed_arrays
from dflow.lowering.paging.paged_memory import PagedMemory
from dflow.lowering.state.applied_steps import AppliedCall, AppliedCopy
from dflow.lowering.state.kept_results import KeptRun
from dflow.lowering.state.store import Limits, read_paged
from dflow.lowering.values.first_value import Unshared
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import CheckpointError, StepCancelled, TaskLost
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.moments import reach

LOGGER = logging.getLogger("dflow")

#: Keys of the record of applied steps, of their results, of the queues and accumulators, of the cluster's id, and of
#: limits of memory, in the metadata of a part, beside those of `TaskPart.saved_as`.
_APPLIED, _KEPT, _RESOURCES, _CLUSTER, _LIMITS = "applied", "kept", "resources", "cluster", "limits"
#: Names of the arrays of results, with their numbers; no variable has a name with the character NUL.
_RESULT = "result\0"


#: The error for state that a return to a snapshot has freed, until a worker has made it again.
_MADE_SINCE = "was made after the snapshot to which all tasks have returned, and no worker has made it again"
_MAKE_AGAIN = "make it in the script of each worker that uses it"


def _usable(folder: Path, task: str) -> Path:
    """Return the task's own folder within `folder`: create it, and remove parts in it that were not written to the end.

    Raises CheckpointError if no file can be written there; only logs a warning if it has a part, which can be read.
    """
    own = folder / task.replace(":", "-")
    try:
        own.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=own):
            pass
        tidy_all(own)  # parts that an earlier process had not written to the end
    except OSError as error:
        if own.is_dir() and any(part.name.isdigit() for part in own.iterdir()):
            LOGGER.warning("%s: no snapshot can be written to %s: %s", task, own, error.strerror or error)
            return own
        raise CheckpointError(
            f"{task}: expected a folder that can be written for --snapshots, got {folder}: {error.strerror or error}",
            "give another folder",
        ) from error
    return own


class _ReadPart(NamedTuple):
    """A part that was read.

    known     values of the variables that this process holds
    new       types, values and memories of the others
    applied   the record of applied steps
    contents  the arrays of `resources`, by name
    copies    the state of the task's parts, by `TaskPart.saved_as`
    """

    known: Mapping[str, Any]
    new: dict[str, tuple[ArrayType, Any, PagedMemory | None]]
    applied: AppliedCopy
    resources: tuple[SavedResource, ...]
    contents: Mapping[str, Any]
    copies: Mapping[str, Any]


class TaskSnapshots(TaskPart):
    """A task's parts of snapshots, in its folder of `TaskSettings.snapshots`; thread-safe.

    A task that was started without a folder reports that it cannot write.
    raises  CheckpointError if no file can be written into the folder, unless it has a part
    """

    def __init__(self, task: TaskServer) -> None:
        self._server, self._task, self._store, self._resources = task, task.name, task.store, task.resources
        folder = task.settings.snapshots
        self._folder = None if folder is None else _usable(folder, short_task_name(self._task))
        #: Notifies the coordinator.
        self._tell: Callable[[Notice], None] = lambda notice: None
        #: Held while state is captured or set, and while a part is written or read.
        self._state_lock, self._disk_lock = threading.Lock(), threading.Lock()
        #: The greatest number of a part that this process has begun to write.
        self._newest = 0
        #: The state that was read for a return, and the return whose state was set last.
        self._read: tuple[LoadState, _ReadPart] | None = None
        self._set_epoch = 0

    def follow(self, session: SessionDriver) -> None:
        """Register for notices of pauses, and for those of snapshots, which are handled on other threads."""
        self._tell = session.tell
        session.call_on(HoldSteps, self._hold_steps)
        session.on_gap.append(self._server.gate.open)  # the notice of a pause that is on comes again
        for kind in (CaptureState, LoadState, SnapshotCommitted):
            session.call_on(kind, partial(self._server.soon, self.handle))

    def _hold_steps(self, notice: HoldSteps) -> None:
        """Hold back the shared steps of this task in a pause, and report when none runs; let them begin if it is over.

        In a pause for a return, also end the parts of steps that wait for a queue.
        """
        if notice.number:
            self._server.gate.close(lambda: self._tell(StepsHeld(self._task, notice.number)))
            if notice.is_for_return:
                self._server.runs.end_blocked("all tasks return to a snapshot")
        else:
            self._server.gate.open()

    def handle(self, message: Notice) -> None:
        """Capture and write a part, load one, or remove old ones. Errors are reported, not raised. It may wait."""
        match message:
            case CaptureState(number):
                self._report(partial(self._write, message), partial(StateWritten, self._task, number))
            case LoadState(_, epoch, is_set):
                self._report(partial(self._load, message), partial(StateLoaded, self._task, epoch, is_set))
            case SnapshotCommitted(number) if self._folder is not None:
                reach("commit", self._task)
                self._remove(lambda other: other < number)

    def _report(self, do: Callable[[], WrittenBytes | None], report: Callable[..., Notice]) -> None:
        try:
            sizes = do() or ()
        except Exception as error:  # any error: the coordinator waits for the outcome
            LOGGER.warning("%s: %s", short_task_name(self._task), error)
            self._tell(report(f"{type(error).__name__}: {error}"))
        else:
            self._tell(report("", *sizes))

    def _write(self, message: CaptureState) -> WrittenBytes:
        number, committed = message.number, message.committed
        reach("capture", self._task)
        with self._state_lock:
            values = self._store.read_together(self._store.keys())
            limits = self._store.limits()
            resources, contents = self._resources.saved()
            applied = self._store.applied.copy()
            copies = {part.saved_as: part.copy() for part in self._parts_with_state()}
        rest: dict[str, Any] = {_APPLIED: applied.calls, _KEPT: applied.kept, _RESOURCES: resources}
        rest |= copies | {_CLUSTER: message.cluster, _LIMITS: limits}
        contents |= {f"{_RESULT}{number}": array for number, array in enumerate(applied.arrays)}
        names = *values, *(one.created.name for one in resources)
        self._tell(StateCaptured(self._task, number, names))
        reach("write", self._task)
        with self._disk_lock:
            location = self._part(number)
            # Those of abandoned snapshots or of an earlier cluster; not a later one, if this thread was overtaken.
            self._remove(lambda other: other != committed and not number < other <= self._newest)
            self._newest = max(self._newest, number)
            with whole_folder(location, marker=MANIFEST, overwrite=True) as part:
                metadata = msgspec.to_builtins(rest, str_keys=True)
                return fill_with_changes(part, {**values, **contents}, self._part_if_whole(committed), metadata)

    def _part_if_whole(self, number: int) -> ChangedArrays | None:
        """Return the part of a snapshot; None if there is none that can be read."""
        with suppress(CheckpointError):
            return read_changed_arrays(self._part(number))
        return None

    def _part(self, number: int) -> Path:
        if self._folder is None:
            raise CheckpointError(
                f"{short_task_name(self._task)} has no folder for snapshots", "start it with --snapshots DIR"
            )
        return self._folder / str(number)

    def _load(self, message: LoadState) -> None:
        """Read this task's part for a return, and set its state if `is_set`; a repeated request does nothing."""
        reach("restore", self._task)
        with self._state_lock:
            if message.epoch <= self._set_epoch:
                return
            if self._read is None or self._read[0].epoch != message.epoch:
                self._read = message, self._read_part(message)
            if message.is_set:
                self._set(self._read[1], message)
                self._read, self._set_epoch = None, message.epoch

    def _read_part(self, message: LoadState) -> _ReadPart:
        if self._task in message.without:
            return _ReadPart({}, {}, AppliedCopy(), (), {}, {})
        files = read_changed_arrays(self._part(message.number))
        if (made_by := files.metadata.get(_CLUSTER, "")) != message.cluster:
            raise CheckpointError(
                f"{files.path}: expected a part that cluster {message.cluster} wrote, got one of cluster {made_by}",
                "give each cluster its own folder for --snapshots",
            )
        calls = msgspec.convert(files.metadata.get(_APPLIED, []), tuple[AppliedCall, ...], strict=False)
        kept_results = msgspec.convert(files.metadata.get(_KEPT, []), tuple[KeptRun, ...])
        results = [f"{_RESULT}{number}" for number in range(sum(one.arrays for one in kept_results))]
        saved_as = {part.saved_as: part.copied for part in self._parts_with_state() if part.saved_as in files.metadata}
        copies = {key: msgspec.convert(files.metadata[key], kind) for key, kind in saved_as.items()}
        saved = msgspec.convert(files.metadata.get(_RESOURCES, []), tuple[SavedResource, ...])
        freed = {*message.forgotten, *message.unsaved}  # a part may have state whose name was free at the capture
        kept = (one for one in saved if one.created.name not in freed)
        resources = tuple(one.reopened() if message.reopens else one for one in kept)
        contents = {one.array_name(array) for one in resources for array in one.arrays}
        others = {*freed, *results, *(one.array_name(array) for one in saved for array in one.arrays)}
        variables = [name for name in files.types if name not in others]
        here = {name: name for name in variables if name in self._store}
        for name in here:
            if (held := self._store.type(name)) != files.types[name]:
                raise CheckpointError(f"variable {name!r} holds {held}, and the snapshot has {files.types[name]}")
        known = self._store.read_saved(files, here)
        absent = [name for name in variables if name not in here]
        limits = msgspec.convert(files.metadata.get(_LIMITS, {}), Limits)
        memories = {name: self._store.memory_for(name, limits.get(name)) for name in absent}
        paged = {name: one for name, one in memories.items() if one is not None and one.takes(files.types[name])}
        # `Store.create` copies these values. Paged ones are read piece by piece below.
        read_now = files.each(dict.fromkeys(name for name in absent if name not in paged))
        new = {name: (files.types[name], value, memories[name]) for name, value in read_now}
        for name, memory in paged.items():
            new[name] = files.types[name], Unshared(read_paged(files, name, memory)), memory
        read = dict(files.each(dict.fromkeys([*contents, *results])))
        applied = AppliedCopy(calls, kept_results, [read[name] for name in results])
        return _ReadPart(known, new, applied, resources, read, copies)

    def _set(self, part: _ReadPart, message: LoadState) -> None:
        error = StepCancelled(f"{short_task_name(self._task)} returns to snapshot {message.number}")
        for step in self._server.runs.steps():
            self._server.runs.cancel(step, error)
        # First the record: an attempt that has begun before changes nothing any more.
        self._store.applied.return_to(part.applied, message.epoch)
        for name in message.unsaved:
            self._store.table.forget(name, f"{name!r} {_MADE_SINCE}", _MAKE_AGAIN, TaskLost)
            self._resources.forget(name, f"{name!r} {_MADE_SINCE}", _MAKE_AGAIN, TaskLost)
        # Also state that was placed when the part had been read.
        for name in {*part.new}.difference(message.unsaved):
            type, value, memory = part.new.pop(name)  # so that not all of them are in memory twice
            self._store.create(name, type, lambda value=value: value, memory=memory)  # type: ignore[misc]
        self._store.replace({name: value for name, value in part.known.items() if name not in message.unsaved})
        resources = (one for one in part.resources if one.created.name not in message.unsaved)
        self._resources.return_to(resources, part.contents)
        for one in self._server.parts:
            one.return_to(part.copies.get(one.saved_as, ()), message.epoch)

    def _parts_with_state(self) -> list[TaskPart]:
        return [part for part in self._server.parts if part.saved_as]

    def _remove(self, is_removed: Callable[[int], bool]) -> None:
        if self._folder is None or not self._folder.is_dir():
            return
        for part in self._folder.iterdir():
            if part.name.isdigit() and is_removed(int(part.name)):
                shutil.rmtree(part, ignore_errors=True)
