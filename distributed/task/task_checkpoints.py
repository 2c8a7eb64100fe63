"""What a task does when the variables that it holds are saved, restored or evaluated.

Each task writes and reads its own variables, in storage that all of the cluster share. A save has three requests: the
task captures its values while no step runs, writes them later, and frees them. If several tasks have parts of one
array, each writes some chunks, and asks the others for their captured elements of these. A restore has two: the task
reads and checks all values, and sets them when every other task has read its own too. For an evaluation by several
workers, a capture is shared under a name. Invariants: a task writes only into the folder of a save that is under way; a
capture is kept as long as a live task uses it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import numpy.typing as npt

from dflow.distributed.task.arrivals import Handled, RequestArrival, RequestTable
from dflow.distributed.task.checkpoint_messages import (
    CapturedArrays,
    CaptureVariables,
    DividedVariable,
    EndCapture,
    EndRestore,
    EndShare,
    ReadCapture,
    ReadCheckpoint,
    ReadPiece,
    SavedVariable,
    SaveVariables,
)
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.wire.codec import decode_arrays, encode_arrays, named
from dflow.distributed.wire.messages.basic import Arrays
from dflow.lowering.files.array_files import piece, write_parts
from dflow.lowering.files.array_manifest import is_inside
from dflow.lowering.files.atomic_directory import flush, is_of_an_attempt
from dflow.lowering.files.divided_array import Bounds, DividedArray
from dflow.lowering.files.locations import location_of, open_arrays
from dflow.lowering.files.narrowed_weights import narrowed
from dflow.lowering.files.object_folder import is_attempt, is_begun
from dflow.lowering.files.object_path import ObjectPath
from dflow.lowering.files.saved_arrays import transposed
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import CheckpointError, TaskLost, WireError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.moments import reach

#: Kind of the names of captured values, in errors.
_CAPTURED = "captured values"

#: The task that saves or restores, and its number for the save or restore.
_Number = tuple[str, int]


@dataclass
class _SharedCapture:
    """A capture that several tasks use, with these tasks."""

    capture: _Number
    values: dict[str, jax.Array]
    users: set[str]


class TaskCheckpoints(TaskPart):
    """The values that a task keeps for saves, restores and evaluations, and their requests; thread-safe."""

    requests: ClassVar[RequestTable[TaskCheckpoints]] = RequestTable()

    def __init__(self, task: TaskServer) -> None:
        self._task, self._name = task, short_task_name(task.name)
        self._lock = threading.Lock()
        #: The values of each save by key.
        self._captured: dict[_Number, dict[str, jax.Array]] = {}
        #: The values of each restore by key; None while they are read.
        self._read: dict[_Number, dict[str, jax.Array] | None] = {}
        #: The captures that tasks share, by name.
        self._shared: dict[str, _SharedCapture] = {}

    @requests.queued(CaptureVariables)
    def capture(self, message: CaptureVariables, arrival: RequestArrival) -> None:
        """Take values at one moment and keep them until the capture ends. Raises VariableError."""
        values = self._task.store.read_together(message.keys)
        with self._lock:
            if not self._task.channel.has_left(message.origin):  # a task that leaves from now on ends its captures
                self._captured[message.origin, message.number] = values

    @requests.queued(EndCapture)
    def end_capture(self, message: EndCapture, arrival: RequestArrival) -> None:
        """Free or share the values of a capture. Raises TaskLost if there are none to share, as after its task left."""
        capture = message.origin, message.number
        with self._lock:
            values = self._captured.pop(capture, None)
            if values is not None and message.share_as:
                self._shared[message.share_as] = _SharedCapture(capture, values, {message.origin})
        if values is None and message.share_as:
            raise TaskLost(f"{self._name} has not captured what {short_task_name(message.origin)} shares")

    @requests.queued(EndShare)
    def end_share(self, message: EndShare, arrival: RequestArrival) -> None:
        """End a task's use of a shared capture."""
        with self._lock:
            self._unuse(message.name, message.reader)

    @requests.queued(ReadCapture)
    def read_shared(self, message: ReadCapture, arrival: RequestArrival) -> Handled:
        """Return the values of a shared capture, or `CapturedArrays()`; the reader then uses the capture."""
        with self._lock:
            shared = self._shared.get(message.name)
            if shared is None:
                return CapturedArrays(), b""
            if not self._task.channel.has_left(message.reader):  # a task that leaves from now on ends its use
                shared.users.add(message.reader)
        infos, data = encode_arrays([named(shared.values, key, _CAPTURED) for key in message.keys])
        return CapturedArrays(*shared.capture, infos), data

    def _unuse(self, name: str, task: str) -> None:
        """End a task's use of a shared capture; the last one frees it."""
        shared = self._shared.get(name)
        if shared is not None:
            shared.users.discard(task)
            if not shared.users:
                del self._shared[name]

    @requests.queued(SaveVariables)
    def save(self, message: SaveVariables, arrival: RequestArrival) -> None:
        """Write captured values into the folder of a save; they are on the disk when it returns.

        Raises CheckpointError, TaskLost if the values are not captured, and ExportError as `narrowed` does.
        """
        folder = location_of(message.folder)
        paths = {one.name: one.path for one in message.variables}
        paths |= {one.name: one.path for one in message.divided}
        if isinstance(folder, ObjectPath):
            is_named = is_attempt(folder.name)
        else:
            is_named = folder.is_absolute() and is_of_an_attempt(folder.name)
        if not (is_named and all(map(is_inside, paths.values()))):
            raise CheckpointError(f"{self._name} writes only into a folder that dflow.save has begun, not {folder}")
        if not (is_begun(folder) if isinstance(folder, ObjectPath) else folder.is_dir()):
            raise CheckpointError(
                f"{self._name} sees no folder {folder.parent}, or not what was begun in it",
                "save where all tasks of the cluster read and write the same files",
            )
        reach("save", self._task.name)
        values = self._values_of(message)
        arrays: dict[str, Any] = {
            one.name: _stored(one, named(values, one.key, _CAPTURED)) for one in message.variables
        }
        arrays |= {one.name: self._divided(message, one) for one in message.divided}
        write_parts(folder, arrays, paths)
        if not isinstance(folder, ObjectPath):
            for path in paths.values():
                flush(folder / path)

    def _values_of(self, message: SaveVariables | ReadPiece) -> dict[str, jax.Array]:
        with self._lock:
            values = self._captured.get((message.origin, message.number))
        if values is None:
            raise TaskLost(f"{self._name} has not captured what {short_task_name(message.origin)} saves")
        return values

    def _divided(self, message: SaveVariables, one: DividedVariable) -> DividedArray:
        here = [number for number, part in enumerate(one.parts) if part.task == self._task.name]
        if not here:
            others = ", ".join(short_task_name(part.task) for part in one.parts) or "none"
            raise WireError(f"array {one.name[:64]!r}: expected a part on {self._name}, got parts on {others}")
        dtype = named(self._values_of(message), one.parts[here[0]].key, _CAPTURED).dtype

        def piece_of(number: int, bounds: Bounds) -> npt.NDArray[Any]:
            part = one.parts[number]
            wanted = ReadPiece(message.origin, message.number, part.key, bounds)
            if number in here:
                return self._piece(wanted)
            answer, payload = self._task.peer(part.task).call(wanted, timeout_s=self._task.settings.reach_timeout_s)
            [array] = decode_arrays(answer.arrays, payload)
            return array

        return DividedArray(ArrayType(dtype, one.shape), [part.indices for part in one.parts], here, piece_of)

    def _piece(self, message: ReadPiece) -> npt.NDArray[Any]:
        return piece(named(self._values_of(message), message.key, _CAPTURED), message.bounds)

    @requests.queued(ReadPiece)
    def read_piece(self, message: ReadPiece, arrival: RequestArrival) -> Handled:
        """Answer with a part of a captured value. Raises TaskLost if it is not captured."""
        infos, data = encode_arrays([np.ascontiguousarray(self._piece(message))])
        return Arrays(infos), data

    @requests.queued(ReadCheckpoint)
    def read(self, message: ReadCheckpoint, arrival: RequestArrival) -> None:
        """Read values from a checkpoint and keep them until the restore ends. Raises CheckpointError.

        Keeps nothing if the restore ends, or its task leaves, meanwhile.
        """
        restore = message.origin, message.number
        with self._lock:
            self._read[restore] = None
        values = None
        try:
            if not self._task.channel.has_left(message.origin):  # a task that leaves from now on ends its restores
                values = self._values(message)
        finally:
            with self._lock:
                is_open = restore in self._read  # it ends early if the restoring task leaves, or waits no longer
                self._read.pop(restore, None)
                if is_open and values is not None:
                    self._read[restore] = values

    def _values(self, message: ReadCheckpoint) -> dict[str, jax.Array]:
        files = open_arrays(message.path)
        if files.id != message.id:
            raise CheckpointError(
                f"{self._name} finds another checkpoint at {message.path} than the task that restores it",
                "save where all tasks of the cluster read and write the same files",
            )
        for name in (*message.variables, *message.parts):
            named(files.types, name, f"arrays of {message.path}")
        files = transposed(files, message.axes)
        parts = {one.key: (name, one.indices) for name, held in message.parts.items() for one in held}
        return self._task.store.read_saved(files, message.variables, parts)

    @requests.queued(EndRestore)
    def end(self, message: EndRestore, arrival: RequestArrival) -> None:
        """Set the variables to the values read for a restore, or free the values. Raises TaskLost if none were read."""
        with self._lock:
            values = self._read.pop((message.origin, message.number), None)
        if not message.is_set:
            return
        if values is None:
            raise TaskLost(f"{self._name} has not read what {short_task_name(message.origin)} restores")
        self._task.store.replace(values)

    def left(self, task: str) -> None:
        """Free the values of saves and restores that a lost task began, and end its use of shared captures."""
        with self._lock:
            self._captured = {number: values for number, values in self._captured.items() if number[0] != task}
            self._read = {number: values for number, values in self._read.items() if number[0] != task}
            for name in list(self._shared):
                self._unuse(name, task)


def _stored(one: SavedVariable, value: jax.Array) -> Any:
    """Return a captured value as it is written."""
    return value if one.narrowing is None else narrowed(one.name, np.asarray(value), one.narrowing)
