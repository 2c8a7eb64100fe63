"""A folder that one process at a time owns: whole folders and small files in it, by their names.

On a disk the owner has a lock, and whole folders come and go by renames. In an object store it has a lease, and they
come and go with their manifests.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from dflow.lowering.files.array_manifest import MANIFEST
from dflow.lowering.files.atomic_directory import remove_whole_folder, tidy_all, whole_folder
from dflow.lowering.files.lease import Lease
from dflow.lowering.files.object_folder import remove_whole_objects, set_objects_aside, tidy, whole_objects
from dflow.lowering.files.object_path import Location, ObjectPath
from dflow.lowering.files.owner_lock import OwnerLock
from dflow.tracing.errors import CheckpointError

#: Number of tries to lock a folder while other processes release or lock it.
_ATTEMPTS = 10
_LOCK = ".manager.lock"


class _OnDisk:
    """A folder on a disk, which may refuse each operation with OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: OwnerLock | None = None

    def own(self, owner: str) -> str | None:
        """Own the folder, made if needed, and remove what a process that ended has left. `owner` names this process.

        Return None, or the name of the process that owns it, empty if it is unknown.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            if (lock := OwnerLock.take_over(self.path / _LOCK)) is not None:
                break
            with suppress(FileExistsError):
                lock = OwnerLock.make(self.path / _LOCK)  # None where the file system has no locks
                break
        else:
            return ""
        self._lock = lock
        try:
            tidy_all(self.path)
        except BaseException:
            self.release()
            raise
        return None

    def check(self) -> None:
        """Raise CheckpointError if this process is known to own the folder no longer; a lock is held until released."""

    def renew(self) -> None:
        """Raise CheckpointError unless this process still owns the folder; a lock is held until it is released."""

    def release(self) -> None:
        """Own the folder no longer."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release(remove=True)

    def names(self) -> list[str]:
        """Return the names of the whole folders, on a disk also those of all other files."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Remove a whole folder."""
        location = self.path / name
        if location.is_symlink():  # the folder that it leads to is another's
            location.unlink()
        else:
            remove_whole_folder(location)

    def set_aside(self, name: str, why: str) -> Path:
        """Free the name of a whole folder; return where the folder is then, its old location if this cannot be done.

        why  a word that a disk adds to the name
        """
        location = self.path / name
        names = [location.with_name(f"{name}.{why}{number}") for number in ("", *range(2, 100))]
        aside = next((one for one in names if not os.path.lexists(one)), location)
        with suppress(OSError):
            os.rename(location, aside)
            return aside
        return location

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file."""
        location = self.path / name
        location.with_suffix(".new").write_bytes(content)
        os.replace(location.with_suffix(".new"), location)


class _InStore:
    """The same in an object store, which may refuse each operation with CheckpointError."""

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        self._lease: Lease | None = None

    def own(self, owner: str) -> str | None:
        lease = Lease.take(self.path / _LOCK, owner)
        if isinstance(lease, str):
            return lease
        self._lease = lease
        try:
            for name in sorted({name.partition("/")[0] for name in self.path.names() if "/" in name}):
                tidy(self.path / name)
        except BaseException:
            self.release()
            raise
        return None

    def check(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def renew(self) -> None:
        if self._lease is not None:
            self._lease.renew()

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def names(self) -> list[str]:
        parts = (name.partition("/") for name in self.path.names())
        return [folder for folder, _, name in parts if name == MANIFEST]

    def remove(self, name: str) -> None:
        remove_whole_objects(self.path / name)

    def set_aside(self, name: str, why: str) -> ObjectPath:
        with suppress(CheckpointError):
            return set_objects_aside(self.path / name)
        return self.path / name

    def write(self, name: str, content: bytes) -> None:
        (self.path / name).write(content)


OwnedFolder = _OnDisk | _InStore


def owned_folder(path: Location) -> OwnedFolder:
    """Return the folder; `own` makes this process its owner."""
    return _InStore(path) if isinstance(path, ObjectPath) else _OnDisk(Path(os.path.realpath(path)))


def whole_location(location: Location, *, overwrite: bool = False) -> AbstractContextManager[Location]:
    """Yield a folder to write arrays into, as `whole_folder` or `whole_objects` does."""
    if isinstance(location, ObjectPath):
        return whole_objects(location, overwrite=overwrite)
    return whole_folder(location, marker=MANIFEST, overwrite=overwrite)
