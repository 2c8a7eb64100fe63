"""The folder of a `CheckpointManager`: one checkpoint a step, a record of its runs, and a lock.

    step_0, step_100, ...   complete checkpoints
    step_200.damaged        a checkpoint that could not be restored; dflow never deletes it
    runs.json               the record of runs
    .manager.lock           locked by the process that saves here
    .step_300.*             a checkpoint being written or removed

Invariant: a folder called `step_N` is complete at every moment, since it appears and disappears by a rename.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from dflow.lowering.files.array_manifest import MANIFEST, read_manifest
from dflow.lowering.files.atomic_directory import remove_whole_folder, tidy_all
from dflow.lowering.files.owner_lock import OwnerLock
from dflow.lowering.files.regular_file import read_regular
from dflow.tracing.errors import CheckpointError
from dflow.training.retention import Checkpoint
from dflow.training.save_schedule import RunRecord

LOGGER = logging.getLogger("dflow")

_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
#: Largest size of the record, in bytes.
_MOST_BYTES = 1 << 20
#: Number of tries to lock the folder while other processes release or lock it.
_ATTEMPTS = 10


class _Saved(msgspec.Struct, frozen=True):
    """What a manager writes into the metadata of a checkpoint."""

    time_s: float
    metrics: dict[str, float]
    ran_s: float = 0.0


class CheckpointFolder:
    """The checkpoints in a folder, and the files beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: OwnerLock | None = None
        #: Whether this process uses the folder, also where the file system has no locks.
        self.is_locked = False

    def place(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or will be."""
        return self.path / f"step_{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a folder, in order, whether or not it can be read."""
        names: list[str] = []
        with self._refused(), suppress(FileNotFoundError):
            names = os.listdir(self.path)
        return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints whose manifests can be read, in order."""
        found = []
        for step in self.steps():
            with suppress(CheckpointError, OSError):  # another process may delete it meanwhile
                found.append(self._checkpoint(step))
        return found

    def _checkpoint(self, step: int) -> Checkpoint:
        place = self.place(step)
        saved = read_manifest(place).metadata.get("manager")
        try:
            about = msgspec.convert(saved, _Saved)
        except msgspec.ValidationError:  # `dflow.save` wrote it
            return Checkpoint(step, place, os.stat(place / MANIFEST).st_mtime, {}, is_managed=False)
        return Checkpoint(step, place, about.time_s, about.metrics, about.ran_s)

    def lock(self) -> None:
        """Lock the folder, made if needed, and remove what a process that ended has left.

        Raises CheckpointError if another manager has locked it, or the disk refuses it.
        """
        with self._refused():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
        self.is_locked = True
        try:
            with self._refused():
                tidy_all(self.path)
        except BaseException:
            self.release()
            raise

    def _locked(self) -> OwnerLock | None:
        """Return the lock; None where the file system has no locks."""
        path = self.path / ".manager.lock"
        for _ in range(_ATTEMPTS):
            if (lock := OwnerLock.take_over(path)) is not None:
                return lock
            with suppress(FileExistsError):
                return OwnerLock.make(path)
        raise CheckpointError(
            f"{self.path}: expected no other CheckpointManager that runs, got one in "
            f"{self.record().running or 'another process'}",
            "close that one or end its process, or give this one another folder",
        )

    def release(self) -> None:
        """Release the lock."""
        lock, self._lock, self.is_locked = self._lock, None, False
        if lock is not None:
            lock.release(remove=True)

    def remove(self, step: int) -> None:
        """Remove a checkpoint. Raises CheckpointError when the disk refuses it."""
        with self._refused():
            remove_whole_folder(self.place(step))

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that its step can be saved again; return its path, the old one if refused."""
        place = self.place(step)
        names = [place.with_name(f"{place.name}.damaged{number}") for number in ("", *range(2, 100))]
        aside = next((name for name in names if not os.path.lexists(name)), place)
        with suppress(OSError):
            os.rename(place, aside)
            return aside
        return place

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
        """Replace the record of runs. Raises CheckpointError when the disk refuses it."""
        place = self.path / "runs.json"
        with self._refused():
            place.with_suffix(".new").write_bytes(msgspec.json.encode(record))
            os.replace(place.with_suffix(".new"), place)

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


def metadata_of(time_s: float, metrics: dict[str, float], ran_s: float) -> dict[str, Any]:
    """Return the metadata of a checkpoint, as in `Checkpoint`."""
    return {"manager": {"time_s": time_s, "metrics": metrics, "ran_s": ran_s}}
