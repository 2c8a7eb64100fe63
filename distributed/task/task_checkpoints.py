"""What a task does when the variables that it holds are saved or restored.

Each task writes and reads its own variables, in storage that all of the cluster share. A save has two requests: the
task captures the values, while no step runs on any task, and writes them later. A restore has two too: the task reads
and checks all values, and sets them when every other task has read its own too. Invariant: a task writes only into the
folder of a save that is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dflow.distributed.wire.messages.checkpoints import (
    CaptureVariables,
    EndRestore,
    EndSave,
    ReadCheckpoint,
    SaveVariables,
)
from dflow.distributed.wire.messages.connection import Ok
from dflow.distributed.wire.messages.message import Request
from dflow.lowering.files.array_files import read_arrays, write_parts
from dflow.lowering.files.array_manifest import is_inside
from dflow.lowering.files.atomic_directory import flush, is_of_an_attempt
from dflow.lowering.state.store import Store
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import CheckpointError, TaskLost

#: The task that saves or restores, and its number for that.
_Key = tuple[str, int]


class TaskCheckpoints:
    """The parts of the task `name` in saves and restores; for any thread.

    `has_left`  whether another task has left the cluster
    """

    def __init__(self, name: str, store: Store, has_left: Callable[[str], bool]) -> None:
        self._name, self._store, self._has_left = short_task_name(name), store, has_left
        self._lock = threading.Lock()
        #: The values of each restore by key; None while they are read.
        self._read: dict[_Key, dict[str, jax.Array] | None] = {}
        #: The captured values of each save by key.
        self._captured: dict[_Key, dict[str, jax.Array]] = {}

    def answer(self, message: Request[Ok]) -> None:
        """Do what a request of `CHECKPOINT_REQUESTS` asks for. Raises what its method raises."""
        CHECKPOINT_REQUESTS[type(message)](self, message)

    def capture(self, message: CaptureVariables) -> None:
        """Keep the present values of variables, which are not copied until a step overwrites them."""
        values = self._store.snapshot(message.keys)
        with self._lock:
            if not self._has_left(message.origin):  # a task that leaves from now on ends its saves
                self._captured[message.origin, message.number] = values

    def end_save(self, message: EndSave) -> None:
        """Free the captured values of a save."""
        with self._lock:
            self._captured.pop((message.origin, message.number), None)

    def save(self, message: SaveVariables) -> None:
        """Write captured values into the folder of a save; they are on the disk when it returns.

        raises  CheckpointError; TaskLost if nothing was captured
        """
        with self._lock:
            values = self._captured.pop((message.origin, message.number), None)
        folder = Path(message.folder)
        places = {one.name: one.place for one in message.variables}
        if not (folder.is_absolute() and is_of_an_attempt(folder.name) and all(map(is_inside, places.values()))):
            raise CheckpointError(f"{self._name} writes only into a folder that dflow.save has begun, not {folder}")
        if not folder.is_dir():
            raise CheckpointError(
                f"{self._name} sees no folder {folder.parent}, or not what was begun in it",
                "save where all tasks of the cluster read and write the same files",
            )
        if values is None:
            raise TaskLost(f"{self._name} has captured nothing for this save of {short_task_name(message.origin)}")
        write_parts(folder, {one.name: values[one.key] for one in message.variables}, places)
        for place in places.values():
            flush(folder / place)

    def read(self, message: ReadCheckpoint) -> None:
        """Read values from a checkpoint and keep them until the restore ends. Raises CheckpointError."""
        restore = message.origin, message.number
        with self._lock:
            self._read[restore] = None
        values = None
        try:
            if not self._has_left(message.origin):  # a task that leaves from now on ends its restores
                values = self._values(message)
        finally:
            with self._lock:
                is_open = restore in self._read  # it ends early if the restoring task leaves, or waits no longer
                self._read.pop(restore, None)
                if is_open and values is not None:
                    self._read[restore] = values

    def _values(self, message: ReadCheckpoint) -> dict[str, jax.Array]:
        files = read_arrays(message.path)
        if files.id != message.id:
            raise CheckpointError(
                f"{self._name} finds another checkpoint at {message.path} than the task that restores it",
                "save where all tasks of the cluster read and write the same files",
            )
        return self._store.read_saved(files, message.variables)

    def end(self, message: EndRestore) -> None:
        """Set the variables to the values read for a restore, or free the values."""
        with self._lock:
            values = self._read.pop((message.origin, message.number), None)
        if not message.is_set:
            return
        if values is None:
            raise TaskLost(f"{self._name} has not read what {short_task_name(message.origin)} restores")
        self._store.replace(values)

    def task_left(self, task: str) -> None:
        """Free the values of saves and restores that a task began and will not end."""
        with self._lock:
            self._read = {restore: values for restore, values in self._read.items() if restore[0] != task}
            self._captured = {save: values for save, values in self._captured.items() if save[0] != task}


#: The method for each request.
CHECKPOINT_REQUESTS: dict[type[Request[Ok]], Callable[[TaskCheckpoints, Any], None]] = {
    CaptureVariables: TaskCheckpoints.capture,
    SaveVariables: TaskCheckpoints.save,
    EndSave: TaskCheckpoints.end_save,
    ReadCheckpoint: TaskCheckpoints.read,
    EndRestore: TaskCheckpoints.end,
}
