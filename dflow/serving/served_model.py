"""A model and its versions: the newest complete one is served, and replaced without losing a request.

A folder is a model if it is an export, or has exports in folders whose names are numbers: `DIR/1`, `DIR/2`. A newer
version is loaded beside the present one, and takes over when its programs are compiled; the old one answers the
requests that it has, and is freed. Invariant: a version that cannot be loaded never replaces one that is served. It is
tried again when its files change; at each look, if this process could not open them, or a task did not answer.
"""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from dflow.exporting.export_format import MANIFEST
from dflow.lowering.files.regular_file import reading_remedy
from dflow.serving.request_batches import OF_TASKS, BatchObserver, RequestQueue
from dflow.serving.served_version import ServedVersion, ServingSettings
from dflow.tracing.errors import ConfigError, DeviceError, DflowError, NoCheckpoint

#: Errors of a load whose tables are for tasks: one does not answer, none is there, or one does not see the files yet.
_OF_TASKS = (*OF_TASKS, DeviceError, NoCheckpoint)
#: Segments of a URL's path that need no `%`: clients can then ask the URL that is printed.
_SEGMENT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._~!$&'()*+,;=:@-]+")
#: The state of a folder's files: name, size and time of change of each.
Files = tuple[tuple[str, int, int], ...]


def find_models(folder: Path, name: str | None = None) -> dict[str, Path]:
    """Return the folders of models at `folder`: itself, or those in it. Raises ConfigError if there are none.

    name  of the model that `folder` is, one segment of a URL's path; by default the folder's own
    """
    if name is not None and not _SEGMENT.fullmatch(name):
        raise ConfigError(
            f"--name: expected a name that a URL can have as one part of its path, got {name!r}",
            "give letters, digits, '-', '_' and '.' alone",
        )
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", "give the directory that dflow.export(...).save wrote")
    if versions_in(folder):
        return {name or folder.resolve().name: folder}
    found = {entry.name: entry for entry in sorted(folder.iterdir()) if entry.is_dir() and versions_in(entry)}
    if not found:
        raise ConfigError(
            f"{folder} holds no export: expected {MANIFEST} in it, in a folder in it, or in DIR/1, DIR/2, ...",
            "give the directory that dflow.export(...).save wrote, or a folder of such directories",
        )
    if name is not None:
        raise ConfigError(f"--name {name} names one model, and {folder} has {', '.join(found)}", "leave it out")
    return found


def versions_in(folder: Path) -> dict[int, Path]:
    """Return the folders of versions by number, and 1 for a folder that is itself an export."""
    if (folder / MANIFEST).exists():
        return {1: folder}
    found = {}
    for entry in folder.iterdir():
        is_number = entry.name.isascii() and entry.name.isdigit() and str(int(entry.name)) == entry.name
        if is_number and (entry / MANIFEST).exists():
            found[int(entry.name)] = entry
    return found


class ServedModel:
    """A model, whose `current` version answers requests; None while no version can be loaded.

    refused  why each version that could not be loaded was refused
    is_gone  whether the folder of `current` is gone, so that it is served from memory
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: ServingSettings,
        observe: BatchObserver,
        report: Callable[[str], None],
    ) -> None:
        self.name, self.folder, self._settings, self._observe, self._report = name, folder, settings, observe, report
        self.refused: dict[int, str] = {}
        self.is_gone = False
        self._tried: dict[int, Files] = {}
        #: Held while a version is loaded or saved.
        self._changing = threading.Lock()
        self.current: ServedVersion | None = None
        self.current = next(self._loadable(0), None)

    @property
    def queues(self) -> Collection[RequestQueue]:
        return self.current.queues.values() if self.current else ()

    @property
    def unavailable(self) -> str:
        return "; ".join(self.refused.values()) or f"{self.name}: {self.folder} holds no export"

    def renew(self, swap: Callable[[Callable[[], None]], None]) -> str | None:
        """Serve a newer version if there is one; return why the newest was refused, or None.

        If the folder of the served version is gone at two calls, the newest of the others takes over. A model that
        learns keeps the version that it changes, since another would lose its updates.

        swap  called with a function that changes `current`, to run it where no request is being submitted
        """
        old = self.current
        with self._changing:
            if self._settings.learn and old is not None:
                number = old.number
                return f"{self.name} learns, and keeps its version {number}; start the server again to change it"
            versions = versions_in(self.folder) if self.folder.is_dir() else {}
            for number in {*self.refused, *self._tried} - {*versions}:
                self.refused.pop(number, None)
                self._tried.pop(number, None)
            # Gone at two looks: an export that replaces another in place is absent for a moment.
            was_gone, self.is_gone = self.is_gone, old is not None and old.number not in versions
            least = 0 if old is None or (was_gone and self.is_gone) else old.number
            new = next(self._loadable(least), None)
            if new is not None:

                def change() -> None:
                    self.current, self.is_gone = new, False

                swap(change)
        is_served = old is not None
        if new is not None:
            self._replaced(old, new)
            del old
            gc.collect()  # its programs and constants are in cycles
        if not versions:
            return f"{self.name}: {self.folder} holds no export" + ("; it is served from memory" if is_served else "")
        return self.refused.get(max(versions))

    def _replaced(self, old: ServedVersion | None, new: ServedVersion) -> None:
        """End the old version, not in `_changing`: its calls take as long as they take."""
        if old is not None:
            old.close()
            old.free()
        ended = f"; version {old.number} is unloaded" if old is not None else ""
        self._report(f"{self.name}: version {new.number} is served{ended}")

    def save(self) -> None:
        """Save the state as a new version, if calls have changed it; the number of the served version becomes its."""
        with self._changing:
            if self.current is None or not self.current.has_unsaved_updates:
                return
            number = max([self.current.number, *versions_in(self.folder)]) + 1
            self.current.save(self.folder / str(number))
            self.current.number = number
            self._report(f"{self.name}: saved as version {number}")

    def _loadable(self, least: int) -> Iterator[ServedVersion]:
        """Yield versions from the newest down to `least` that can be loaded; record those refused.

        The served version, and those refused, are loaded again only if their files have changed, or a task has lost
        rows of the served one.
        """
        for number, path in sorted(versions_in(self.folder).items(), reverse=True) if self.folder.is_dir() else []:
            files = _files_of(path)
            is_known = number in self.refused or (self.current is not None and number == self.current.number)
            is_lost = self.current is not None and number == self.current.number and self.current.is_lost
            if number < least or (is_known and not is_lost and files == self._tried.get(number)):
                continue
            self._tried[number] = files
            version = None
            try:
                version = ServedVersion(self.name, number, path, self._settings, self._observe)
            except (DflowError, OSError, ValueError, RuntimeError) as error:
                if _may_pass(error):
                    del self._tried[number]  # its files are not the reason
                self._refuse(number, f"{self.name}: version {number} is refused: {error}")
            if version is None:
                gc.collect()  # what it loaded is in cycles, and in the frames of the error
                continue
            self.refused.pop(number, None)
            for note in version.notes:
                self._report(note)
            yield version

    def _refuse(self, number: int, reason: str) -> None:
        if self.refused.get(number) != reason:
            self.refused[number] = reason
            self._report(reason)


def _may_pass(error: BaseException | None) -> bool:
    """Return whether a later load may succeed: tasks did not answer, or this process could not open a file."""
    while error is not None:
        if isinstance(error, _OF_TASKS) or (isinstance(error, OSError) and reading_remedy(error)):
            return True
        error = error.__cause__
    return False


def _files_of(folder: Path) -> Files:
    found = []
    for inner, _, names in os.walk(folder):
        for name in names:
            try:
                state = os.stat(os.path.join(inner, name))
            except FileNotFoundError:
                continue
            found.append((os.path.join(inner, name), state.st_size, state.st_mtime_ns))
    return tuple(sorted(found))
