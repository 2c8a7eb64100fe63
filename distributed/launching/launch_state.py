"""The record of a launch in its folder of snapshots: the next launch at this folder resumes it, unless it has finished.

Why: all processes may die, with the launcher. Then the folder has the tasks' parts of snapshots and the coordinator's
state, which says which snapshot is complete. Invariants: at most one launch uses a folder; the state that a coordinator
finds there is that of this launch, which goes on, or begins with a snapshot of the one before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import msgspec

from dflow.distributed.coordinator.coordinator_store import SqliteStore
from dflow.distributed.coordinator.durable_records import SHELL, Change, replacing
from dflow.distributed.coordinator_role import COORDINATOR_PARTS
from dflow.distributed.snapshots.resumption import Snapshot, newest_snapshot, resumed
from dflow.lowering.files.owner_lock import OwnerLock
from dflow.tracing.devices.task_name import split_task_name
from dflow.tracing.errors import ConfigError

#: Longest wait for the coordinator of a launch that was killed to end, in s.
WAIT_S = 10.0
LOGGER = logging.getLogger("dflow")
_STATE, _LOCK = "coordinator.sqlite", "launch.lock"
_LAUNCH = f"{SHELL}launch"


class _LaunchRecord(msgspec.Struct, frozen=True):
    """The file name of a launch's script, and whether the launch has ended with success."""

    script: str
    is_finished: bool = False


class LaunchState:
    """The state of a launch of `script`, which uses `folder` alone until `close`.

    Construction prepares the coordinator's state there: it resumes the newest snapshot of a launch that has not
    finished, or begins without state.

    stock   number of task servers of each job
    raises  ConfigError when another launch uses the folder, or it has a snapshot that this launch cannot resume
    """

    def __init__(self, folder: Path, script: str, stock: Mapping[str, int]) -> None:
        self._folder, self._script = folder, Path(script).name
        #: The file of the coordinator's state.
        self.path = folder / _STATE
        self._lock = _locked(folder)
        try:
            #: Text for the user: the snapshot that this launch resumes, if there is one.
            self.news = self._begin(stock)
        except BaseException:
            self.close()
            raise

    def _begin(self, stock: Mapping[str, int]) -> str:
        with closing(SqliteStore(self.path, wait_s=WAIT_S)) as store:
            rows = store.load()
            launch = _LaunchRecord("")
            if _LAUNCH in rows:
                launch = msgspec.msgpack.decode(rows[_LAUNCH], type=_LaunchRecord)
            snapshot = None if launch.is_finished else newest_snapshot(rows)
            begun = resumed(rows, snapshot, COORDINATOR_PARTS)
            if snapshot is not None:
                self._check(launch, snapshot, stock)
                news = f"the job goes on from snapshot {snapshot.number}, {_moment(snapshot)}"
            elif launch.is_finished:
                news = f"the job whose snapshots are in {self._folder} has finished; this one starts from the beginning"
            else:
                news = f"{self._folder} has no complete snapshot; the job starts from the beginning"
            changes = replacing(rows, begun)
            store.write([*(Change(*change) for change in changes.items()), self._launch()])
        return news

    def _check(self, launch: _LaunchRecord, snapshot: Snapshot, stock: Mapping[str, int]) -> None:
        if launch.script not in ("", self._script):
            raise ConfigError(
                f"--snapshots {self._folder}: expected the script {launch.script}, whose job has not finished, got "
                f"{self._script}",
                "give another folder",
            )
        needed: Counter[str] = Counter()
        for job, index in map(split_task_name, snapshot.tasks):
            needed[job] = max(needed[job], index + 1)
        for job, count in needed.items():
            if stock.get(job, 0) < count:
                raise ConfigError(
                    f"--snapshots {self._folder}: expected at least --stock {job}={count}, as its snapshot has "
                    f"parts of as many tasks, got {job}={stock.get(job, 0)}",
                    "start as many tasks as before, or give another folder",
                )

    def _launch(self, *, is_finished: bool = False) -> Change:
        return Change(_LAUNCH, msgspec.msgpack.encode(_LaunchRecord(self._script, is_finished)))

    def finish(self) -> None:
        """Record that the launch has ended with success, and is not to be resumed. Its coordinator must have ended.

        Logs a warning if the folder cannot be written: the results are as they are.
        """
        try:
            with closing(SqliteStore(self.path, wait_s=WAIT_S)) as store:
                store.write([self._launch(is_finished=True)])
        except (OSError, ConfigError) as error:
            LOGGER.warning("the next launch at %s goes on with this job, which has finished: %s", self._folder, error)

    def close(self) -> None:
        """Leave the folder to other launches."""
        if self._lock is not None:
            self._lock.release(remove=True)


def _moment(snapshot: Snapshot) -> str:
    """Describe the moment of a snapshot."""
    if snapshot.steps_done is not None:
        return f"with {snapshot.steps_done} steps done"
    return "from before the first checkpoint of a run; a dflow.CheckpointManager restores its newest one"


def _locked(folder: Path) -> OwnerLock | None:
    """Lock the folder, made if it does not exist; None where the file system has no locks."""
    path = folder / _LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return OwnerLock.make(path)
    except FileExistsError:
        lock = OwnerLock.take_over(path)
    except OSError as error:
        raise ConfigError(
            f"--snapshots: expected a folder that can be written, got {folder}: {error.strerror or error}",
            "give another folder",
        ) from error
    if lock is None:
        raise ConfigError(f"--snapshots {folder} is used by another launch", "end it, or give another folder")
    return lock
