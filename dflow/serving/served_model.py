"""A model and its versions: the newest complete one is served, and replaced without losing a request.

A folder is a model if it is an export, or has exports in folders whose names are numbers: `DIR/1`, `DIR/2`. A newer
version is loaded beside the present one, and takes over when its programs are compiled; the old one answers the
requests that it has, and is freed. Invariant: a version that cannot be loaded never replaces one that is served. It is
tried again when its files change.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dflow.exporting.export_format import MANIFEST
from dflow.serving.request_batches import BatchObserver
from dflow.serving.served_version import ServedVersion, ServingSettings
from dflow.tracing.errors import ConfigError, DflowError, ExportError

#: The state of a folder's files: name, size and time of change of each.
Files = tuple[tuple[str, int, int], ...]


def find_models(folder: Path, name: str | None = None) -> dict[str, Path]:
    """Return the folders of models at `folder`: itself, or those in it. Raises ConfigError if there are none.

    name  of the model that `folder` is; by default the folder's own
    """
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
    """A model, whose `current` version answers requests. Raises ExportError if no version can be loaded.

    refused  why each version that could not be loaded was refused
    swap     called with a function that changes `current`, to run it where no request is being submitted
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: ServingSettings,
        observer: BatchObserver,
        report: Callable[[str], None],
    ) -> None:
        self.name, self.folder, self._settings, self._observer, self._report = name, folder, settings, observer, report
        self.refused: dict[int, str] = {}
        self._tried: dict[int, Files] = {}
        #: Held while a version is loaded or saved.
        self._changing = threading.Lock()
        self._files: Files = ()
        found = next(self._loadable(0), None)
        if found is None:
            reasons = "\n".join(self.refused.values())
            raise ExportError(f"{name}: none of its {len(self.refused)} versions can be served:\n{reasons}")
        self.current = found

    def renew(self, swap: Callable[[Callable[[], None]], None]) -> str | None:
        """Serve a newer version if there is one; return why the newest was refused, or None.

        A model that learns keeps the version that it changes, since another would lose its updates.
        """
        old: ServedVersion | None = None
        with self._changing:
            if self._settings.learn:
                number = self.current.number
                return f"{self.name} learns, and keeps its version {number}; start the server again to change it"
            versions = versions_in(self.folder) if self.folder.is_dir() else {}
            if new := next(self._loadable(self.current.number), None):
                old = self.current

                def change() -> None:
                    self.current = new

                swap(change)
            newest = max(versions, default=0)
            refusal = self.refused.get(newest) if newest >= self.current.number else None
        if old is not None and new is not None:
            old.close()  # not in `_changing`: its calls take as long as they take
            self._report(f"{self.name}: version {new.number} is served; version {old.number} is unloaded")
        return refusal

    def save(self) -> None:
        """Save the state as a new version, if calls have changed it; the number of the served version becomes its."""
        with self._changing:
            if not self.current.has_unsaved_updates:
                return
            number = max([self.current.number, *versions_in(self.folder)]) + 1
            self.current.save(self.folder / str(number))
            self.current.number = number
            self._report(f"{self.name}: saved as version {number}")

    def _loadable(self, served: int) -> Iterator[ServedVersion]:
        """Yield versions newer than the served one, or changed since, from the newest on; record those refused."""
        for number, path in sorted(versions_in(self.folder).items(), reverse=True) if self.folder.is_dir() else []:
            if number < served or (files := _files_of(path)) == self._tried.get(number):
                continue
            self._tried[number] = files
            try:
                version = ServedVersion(self.name, number, path, self._settings, self._observer)
            except (DflowError, OSError, ValueError, RuntimeError) as error:
                self.refused[number] = f"{self.name}: version {number} is refused: {error}"
                self._report(self.refused[number])
                continue
            self.refused.pop(number, None)
            for note in version.notes:
                self._report(note)
            yield version


def _files_of(folder: Path) -> Files:
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                state = os.stat(os.path.join(place, name))
            except FileNotFoundError:
                continue
            found.append((os.path.join(place, name), state.st_size, state.st_mtime_ns))
    return tuple(sorted(found))
