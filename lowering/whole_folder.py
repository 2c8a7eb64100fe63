"""A folder that appears whole or not at all, and replaces an older one of its name the same way.

It is written beside its place under a hidden name, flushed to the disk, and renamed. Where the system can exchange two
names (Linux, macOS), there is a whole folder in place at every moment. Elsewhere the old one steps aside first, and
`present` finds it there if the process ends in that instant.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from dflow.tracing.errors import CheckpointError, CheckpointExists
from dflow.tracing.source import at, caller

Part = TypeVar("Part")

_numbers = itertools.count()
#: What this process is writing now.
_busy: set[Path] = set()

#: How many files are flushed at a time.
_FLUSHES = 16
#: How many folders are removed at a time.
_REMOVALS = 4

_AT_FDCWD = -100
_EXCHANGE = 2


@contextmanager
def whole_folder(path: str | os.PathLike[str], *, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder to write into, which becomes `path` when the block ends, and is removed if it fails.

    marker     the file that every folder of this kind holds; a folder without it is never overwritten
    overwrite  whether a folder that is there may be replaced
    raises     CheckpointExists when `path` is there and may not be replaced, CheckpointError when the disk refuses it
    """
    place = Path(os.path.realpath(path))
    with _refused_by_the_disk(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        _tidy(place)
    _check_free(place, marker, overwrite)
    staging = place.with_name(f".{place.name}.{platform.node()}-{os.getpid()}-{next(_numbers)}.writing")
    _busy.add(staging)
    try:
        with _refused_by_the_disk(place):
            os.mkdir(staging)
            yield staging
            _flush(staging)
            if overwrite and place.exists():
                _replace(staging, place)
            else:
                _appear(staging, place)
    finally:
        try:
            _remove(staging)
        finally:
            _busy.discard(staging)


@contextmanager
def _refused_by_the_disk(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be written: {error.strerror or error}{at(caller())}\n"
            "  what was there before is as it was; save where there is room and leave to write"
        ) from error


def present(path: str | os.PathLike[str]) -> Path:
    """Where the folder `path` is: in its place, or aside because a process ended while it replaced it."""
    place = Path(os.path.realpath(path))
    aside = _aside(place)
    return aside if not place.exists() and aside.exists() else place


def write_file(path: Path, text: str) -> None:
    """Write a file of a folder that is yet to appear, and be flushed."""
    path.write_text(text, encoding="utf-8")


def _check_free(place: Path, marker: str, overwrite: bool) -> None:
    if not place.exists():
        return
    if not overwrite:
        raise CheckpointExists(f"{place} exists{at(caller())}\n  save to another path, or give overwrite=True")
    if not (place / marker).is_file():
        raise CheckpointExists(
            f"{place} exists and holds no {marker}, so it is not what may be overwritten{at(caller())}\n"
            "  save to another path, or remove it yourself"
        )


def _appear(staging: Path, place: Path) -> None:
    try:
        os.rename(staging, place)
    except OSError as error:
        if not place.exists():
            raise
        raise CheckpointExists(
            f"{place} was made while this was written{at(caller())}\n  save to another path, or give overwrite=True"
        ) from error
    _sync(place.parent)


def _replace(staging: Path, place: Path) -> None:
    if not _exchange(staging, place):
        os.rename(place, _aside(place))
        os.rename(staging, place)
    _sync(place.parent)
    # What was there before now has the other name.
    _remove(staging)
    _remove(_aside(place))


def _aside(place: Path) -> Path:
    return place.with_name(f".{place.name}.replaced")


def _tidy(place: Path) -> None:
    """Put back, or remove, what a process that ended while it wrote has left."""
    aside = _aside(place)
    if aside.exists():
        if place.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, place)
    if os.name == "posix":
        head = f".{place.name}.{platform.node()}-"
        for left in place.parent.iterdir():
            if left.name.startswith(head) and left.name.endswith(".writing") and left not in _busy:
                pid = left.name.removeprefix(head).partition("-")[0]
                if pid == str(os.getpid()) or (pid.isdecimal() and not _runs(int(pid))):
                    shutil.rmtree(left, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Whether the system has exchanged the two names, at once."""
    first, second = os.fsencode(one), os.fsencode(other)
    libc: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _EXCHANGE)
    elif sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(first, second, _EXCHANGE)
    else:
        return False
    if failed and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise CheckpointError(f"{other} cannot be replaced: {os.strerror(ctypes.get_errno())}{at(caller())}")
    return not failed


def _remove(folder: Path) -> None:
    """Remove a folder, if it is there; some parts at a time, since a disk may let each wait for milliseconds."""
    walked = list(os.walk(folder, topdown=False))
    _do_all(_remove_part, walked, _REMOVALS)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_part(part: tuple[str, list[str], list[str]]) -> None:
    """Remove the files of a folder, and itself where no folder is left in it."""
    inner, _, files = part
    with suppress(OSError):
        for name in files:
            os.unlink(os.path.join(inner, name))
        os.rmdir(inner)


def _flush(folder: Path) -> None:
    """Have the disk hold all of a folder, files and entries; many at a time, which the disk takes together."""
    walked = list(os.walk(folder))
    paths = [Path(inner, name) for inner, _, files in walked for name in files] + [Path(inner) for inner, *_ in walked]
    _do_all(_sync, paths, _FLUSHES)


def _do_all(work: Callable[[Part], None], parts: Sequence[Part], at_a_time: int) -> None:
    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            done = [pool.submit(work, part) for part in parts]
        except RuntimeError:
            # The process ends, or has too many threads.
            done = []
        for one in done:
            one.result()
    if not done:
        for part in parts:
            work(part)


def _sync(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
