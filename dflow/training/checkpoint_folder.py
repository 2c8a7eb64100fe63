"""The folder of a `CheckpointManager`: one checkpoint a step, a record of its runs, and a lock.

    step_0, step_100, ...   complete checkpoints
    step_200.damaged        a checkpoint that could not be restored; dflow never deletes it
    step_300.undone         a checkpoint of steps that are done again; dflow never deletes it
    runs.json               the record of runs
    .manager.lock           locked by the process that saves here; in an object store, its lease
    .step_400.*             a checkpoint being written or removed

Invariant: a checkpoint called `step_N` is complete at every moment, since it appears and disappears by a rename, or
with its manifest. In an object store one that was set aside, and one being written, is a folder within `step_N`.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dflow.lowering.files.array_manifest import MANIFEST, read_manifest
from dflow.lowering.files.object_path import Location, ObjectPath
from dflow.lowering.files.owned_folder import owned_folder
from dflow.lowering.files.regular_file import read_regular
from dflow.tracing.errors import CheckpointError, DamagedCheckpoint
from dflow.training.retention import Checkpoint
from dflow.training.save_schedule import RunRecord

LOGGER = logging.getLogger("dflow")

_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
#: Largest size of the record, in bytes.
_MOST_BYTES = 1 << 20


class ManagerMetadata(msgspec.Struct, frozen=True):
    """What a manager writes into the metadata of a checkpoint, as `manager`; the fields are those of `Checkpoint`."""

    time_s: float
    metrics: dict[str, float]
    ran_s: float = 0.0
    extra: dict[str, float] = {}
    is_finite: bool = True


class CheckpointFolder:
    """The checkpoints in a folder, and the files beside them."""

    def __init__(self, path: Location) -> None:
        self.files = owned_folder(path)
        self.path = self.files.path
        #: Whether this process uses the folder, also where the file system has no locks.
        self.is_locked = False

    def location(self, step: int) -> Location:
        """Return where the checkpoint of a step is, or will be."""
        return self.path / f"step_{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a folder, in order, whether or not it can be read."""
        with self._refused():
            return sorted(int(found[1]) for name in self.files.names() if (found := _STEP.fullmatch(name)))

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints whose manifests can be read, in order."""
        found = []
        for step in self.steps():
            try:
                found.append(self._checkpoint(step))
            except (DamagedCheckpoint, OSError):  # another process may delete it meanwhile
                continue
            except CheckpointError:  # a newer dflow wrote it, or a store does not answer
                if isinstance(self.path, ObjectPath):
                    raise
        return found

    def _checkpoint(self, step: int) -> Checkpoint:
        location = self.location(step)
        path = str(location) if isinstance(location, ObjectPath) else location
        saved = read_manifest(location).metadata.get("manager")
        try:
            about = msgspec.convert(saved, ManagerMetadata)
        except msgspec.ValidationError:  # `dflow.save` wrote it
            time_s = os.stat(path / MANIFEST).st_mtime if isinstance(path, Path) else math.nan
            return Checkpoint(step, path, time_s, {}, is_managed=False)
        return Checkpoint(
            step, path, about.time_s, about.metrics, about.ran_s, extra=about.extra, is_finite=about.is_finite
        )

    def lock(self) -> None:
        """Lock the folder, made if needed, and remove what a process that ended has left.

        Raises CheckpointError if another manager has locked it, or the disk refuses it.
        """
        with self._refused():
            owner = self.files.own(this_process())
        if owner is not None:
            raise CheckpointError(
                f"{self.path}: expected no other CheckpointManager that runs, got one in "
                f"{owner or self.record().running or 'another process'}",
                "close that one or end its process, or give this one another folder",
            )
        self.is_locked = True

    def release(self) -> None:
        """Release the lock."""
        self.is_locked = False
        self.files.release()

    def remove(self, step: int) -> None:
        """Remove a checkpoint. Raises CheckpointError when the disk refuses it."""
        with self._refused():
            self.files.remove(self.location(step).name)

    def record(self) -> RunRecord:
        """Return the record of runs; an empty one if there is none, or if it is damaged, with a warning."""
        try:
            return msgspec.json.decode(read_regular(self.path / "runs.json", _MOST_BYTES), type=RunRecord)
        except FileNotFoundError:
            return RunRecord()
        except (OSError, msgspec.MsgspecError) as error:
            LOGGER.warning(
                "%s is damaged: %s; it is begun again, so every='auto' counts no earlier failure",
                *(self.path / "runs.json", error),
            )
            return RunRecord()

    def write_record(self, record: RunRecord) -> None:
        """Replace the record of runs. Raises CheckpointError if the disk refuses, or another manager has taken over."""
        self.files.check()
        with self._refused():
            self.files.write("runs.json", msgspec.json.encode(record))

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Raise CheckpointError where the disk refuses something."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: expected a folder that can be written, got: {error.strerror or error}",
                "make room or give leave to write, or give another folder",
            ) from error


def this_process() -> str:
    """Return the name of this process for other jobs."""
    return f"process {os.getpid()} on {platform.node() or 'an unnamed host'}"
