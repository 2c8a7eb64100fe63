"""Atomic directories: a folder appears complete or not at all, and replaces an older one of its name the same way.

It is written beside its final path under a hidden name, flushed to the disk, and renamed. Where the file system can
exchange two names, there is a complete folder at the path at every moment. Elsewhere the old one is renamed first, and
`present` finds it there if the process ends at that moment.

Each attempt to write has a random name and a lock, which is free once its process has ended. The next attempt then
removes its leftovers. Host names and process ids would not do, since containers share both. Invariant: no process
removes a folder under a name that another may be about to put in place. It renames the folder first. So if a lock is
free although its owner runs, the owner's save fails and the checkpoint in place stays.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from dflow.lowering.files.owner_lock import OwnerLock
from dflow.tracing.errors import CheckpointError, CheckpointExists, DflowError

Part = TypeVar("Part")

#: Number of tries to put a folder in place when another process puts one there meanwhile.
_ATTEMPTS = 10

#: How the names of an attempt end, and the pattern of the names, to be formatted with the name of the location.
_KINDS = ("lock", "writing", "replaced", "ended")
_ATTEMPT_NAME = rf"\.{{}}\.([0-9a-f]{{{{16}}}})\.(?:{'|'.join(_KINDS)})"

#: Number of files that are flushed concurrently.
_FLUSHES = 16
#: Number of folders that are removed concurrently.
_REMOVALS = 4

_AT_FDCWD = -100
_EXCHANGE = 2


class _Attempt:
    """The names beside `location` that belong to one attempt to write it.

    staging  the folder being written; after an exchange, the old folder
    aside    the old folder, on systems that cannot exchange names
    ended    the folder about to be removed
    """

    def __init__(self, location: Path, token: str) -> None:
        self.location = location
        self.lock, self.staging, self.aside, self.ended = (
            location.with_name(f".{location.name}.{token}.{kind}") for kind in _KINDS
        )

    @staticmethod
    def all_of(location: Path) -> list[_Attempt]:
        """Return the attempts that have files or folders beside `location`, whether running or ended."""
        name = re.compile(_ATTEMPT_NAME.format(re.escape(location.name)))
        with suppress(FileNotFoundError, NotADirectoryError):
            tokens = {found[1] for entry in os.listdir(location.parent) if (found := name.fullmatch(entry))}
            return [_Attempt(location, token) for token in sorted(tokens)]
        return []

    def settle(self, lock: OwnerLock | None) -> None:
        """Put the old folder back if nothing is in place, remove the rest, and release the lock."""
        is_settled = False
        try:
            if not self.location.exists():
                with suppress(OSError):
                    os.rename(self.aside, self.location)
            _remove(self.ended)
            for left in (self.staging, self.aside):
                with suppress(OSError):
                    os.rename(left, self.ended)
                _remove(self.ended)
            is_settled = not any(map(os.path.lexists, (self.staging, self.aside, self.ended)))
        finally:
            if lock is not None:
                lock.release(remove=is_settled)


@contextmanager
def whole_folder(path: str | os.PathLike[str], *, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write into, which becomes `path` when the block ends, and is removed if the block fails.

    marker     the file that every folder of this kind holds; a folder without it is never overwritten unless it is
               empty
    overwrite  whether an existing folder may be replaced
    raises     CheckpointExists when `path` exists and may not be replaced, CheckpointError when the disk refuses it
    """
    location = Path(os.path.realpath(path))
    with refused_by_the_disk(location):
        location.parent.mkdir(parents=True, exist_ok=True)
        _tidy(location)
        _check_free(location, marker, overwrite)
        with _attempt(location) as attempt:
            os.mkdir(attempt.staging)
            yield attempt.staging
            flush(attempt.staging)
            if not (attempt.staging / marker).is_file():
                raise CheckpointError(
                    f"{location} cannot be written: {attempt.staging} was emptied while it was written",
                    "what was there before is as it was; see what else removes files there, and save again",
                )
            _put_in_place(attempt, overwrite)


@contextmanager
def refused_by_the_disk(location: Path) -> Iterator[None]:
    """Raise CheckpointError, with the reason, where the disk refuses to write at `location`."""
    try:
        yield
    except DflowError:  # subclasses may be OSErrors too
        raise
    except OSError as error:
        raise CheckpointError(
            f"{location} cannot be written: {_reason(location, error)}",
            "what was there before is as it was; save where there is room and leave to write",
        ) from error


def _reason(location: Path, error: OSError) -> str:
    """Return the reason why the disk refuses a folder at `location`."""
    folder = next(parent for parent in location.parents if parent.exists())
    if not folder.is_dir():
        return f"{folder} is no folder"
    if error.errno == errno.ENOENT and error.filename and Path(os.fsdecode(error.filename)).parent == folder:
        return f"{folder} takes no new files"
    return error.strerror or str(error)


@contextmanager
def _attempt(location: Path) -> Iterator[_Attempt]:
    """Yield the names of a new attempt, and remove the files and folders under them when the block ends."""
    while True:
        attempt = _Attempt(location, secrets.token_hex(8))
        with suppress(FileExistsError):
            lock = OwnerLock.make(attempt.lock)
            break
    try:
        yield attempt
    finally:
        attempt.settle(lock)


def remove_whole_folder(path: str | os.PathLike[str]) -> None:
    """Remove the folder `path`, if it exists. It disappears by a rename; its files are removed after that.

    Raises OSError when the disk refuses the rename.
    """
    location = Path(os.path.realpath(path))
    with _attempt(location) as attempt, suppress(FileNotFoundError):
        os.rename(location, attempt.ended)


def tidy_all(folder: Path) -> None:
    """Put back, or remove, everything in `folder` that was left by processes that ended while they wrote or removed."""
    name = re.compile(_ATTEMPT_NAME.format("(.+)"))
    for location in sorted({found[1] for entry in os.listdir(folder) if (found := name.fullmatch(entry))}):
        _tidy(folder / location)


def is_of_an_attempt(name: str) -> bool:
    """Whether a name belongs to an attempt: a folder being written, or left by a process that has ended."""
    return re.fullmatch(_ATTEMPT_NAME.format(".+"), name) is not None


def present(path: str | os.PathLike[str]) -> Path:
    """Return where the folder `path` is: in its place, or renamed by a process that ended while it replaced it."""
    location = Path(os.path.realpath(path))
    if location.exists():
        return location
    asides = [attempt.aside for attempt in _Attempt.all_of(location) if attempt.aside.exists()]
    return max(asides, key=lambda aside: aside.stat().st_mtime_ns, default=location)


def _check_free(location: Path, marker: str, overwrite: bool) -> None:
    if not location.exists():
        return
    if not overwrite:
        raise CheckpointExists(f"{location} exists", "save to another path, or give overwrite=True")
    if not (location / marker).is_file() and not (location.is_dir() and not any(location.iterdir())):
        raise CheckpointExists(
            f"{location} exists and holds no {marker}, so it is not what may be overwritten",
            "save to another path, or remove it yourself",
        )


def _put_in_place(attempt: _Attempt, overwrite: bool) -> None:
    """Rename the staging folder to its location, with retries if other processes put folders there meanwhile."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            if overwrite and attempt.location.exists():
                _replace(attempt)
            else:
                os.rename(attempt.staging, attempt.location)
            break
        except OSError as error:
            if not overwrite and attempt.location.exists():
                raise CheckpointExists(
                    f"{attempt.location} was made while this was written",
                    "save to another path, or give overwrite=True",
                ) from error
            if not left or error.errno not in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
                raise
    _sync(attempt.location.parent)


def _replace(attempt: _Attempt) -> None:
    if not _exchange(attempt.staging, attempt.location):
        _remove(attempt.aside)  # it is older than the folder in place
        os.rename(attempt.location, attempt.aside)
        os.rename(attempt.staging, attempt.location)
        # A folder of this name is never put back.
        os.rename(attempt.aside, attempt.ended)


def _tidy(location: Path) -> None:
    """Put back, or remove, the folders left by processes that ended while they wrote."""
    for attempt in _Attempt.all_of(location):
        if (lock := OwnerLock.take_over(attempt.lock)) is not None:
            attempt.settle(lock)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the file system or the C library cannot. Raises OSError."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    failed = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    number = ctypes.get_errno()
    if failed and number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(number, os.strerror(number), str(other))
    return not failed


def _remove(folder: Path) -> None:
    """Remove a folder, if it exists; by several threads, since a disk may take milliseconds for each file."""
    if folder.is_symlink():
        folder.unlink()
        return
    walked = list(os.walk(folder, topdown=False))
    _do_all(_remove_part, walked, _REMOVALS)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_part(part: tuple[str, list[str], list[str]]) -> None:
    """Remove the files of a folder, and the folder if no subfolder is left in it."""
    inner, _, files = part
    with suppress(OSError):
        for name in files:
            os.unlink(os.path.join(inner, name))
        os.rmdir(inner)


def flush(folder: Path) -> None:
    """Flush the files and entries of a folder to the disk; by several threads, so that the disk can combine writes."""
    walked = list(os.walk(folder))
    # TensorStore renames its `.__lock` files; another process may be writing one.
    paths = [Path(inner, name) for inner, _, files in walked for name in files if not name.endswith(".__lock")]
    paths += [Path(inner) for inner, *_ in walked]
    _do_all(_sync, paths, _FLUSHES)


def _do_all(work: Callable[[Part], None], parts: Sequence[Part], at_a_time: int) -> None:
    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            done = [pool.submit(work, part) for part in parts]
        except RuntimeError:
            # The interpreter is shutting down, or no thread can start.
            done = []
        for one in done:
            one.result()
    if not done:
        for part in parts:
            work(part)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
