"""JAX's persistent compilation cache of launched tasks: a start reads the programs that an earlier one compiled.

JAX is configured by its environment variables. Where the environment of a task names a folder, or switches the cache
on or off, nothing is changed. Each host has another folder, as processors differ, and only its user may write
there, since a process runs what it finds. JAX removes the programs that were used least recently.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
SWITCH_VARIABLE = "JAX_ENABLE_COMPILATION_CACHE"
MAX_BYTES = 1 << 30

#: Ends of the names of JAX's files: of a program, and of the time of its last use.
_PROGRAM, _TIME = "-cache", "-atime"

_SETTINGS = {
    # With a limit JAX also locks the folder, and no process reads a program that is half written.
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(MAX_BYTES),
    # A step has many small programs, and JAX by default keeps a program only if it compiles for a second.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for a task with this environment; None if that decides itself, or the user has no home."""
    if FOLDER_VARIABLE in environment or SWITCH_VARIABLE in environment:
        return None
    caches = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME") or "~", ".cache")
    try:
        return Path(caches).expanduser() / "dflow" / "compiled" / (platform.node() or "host")
    except RuntimeError:  # as in a container whose user has no name
        return None


def cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Make the folder, unless it is there, and return the variables for JAX to use it.

    There are none if the folder cannot be made or written, or if others may write there.

    environment  that of the task
    """
    if (folder := cache_folder(environment)) is None:
        return {}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        is_private = found.st_uid == os.getuid() and not found.st_mode & 0o022
        if not is_private or not os.access(folder, os.W_OK):
            return {}
        _remove_unfinished(folder)
    except OSError:
        return {}
    return {FOLDER_VARIABLE: str(folder), **_SETTINGS}


def _remove_unfinished(folder: Path) -> None:
    """Remove programs without the time of their last use, which JAX writes after them.

    A killed process and a full disk leave such programs, with which JAX keeps no others. If a process is just writing
    one, it is compiled once more.
    """
    for program in folder.glob(f"*{_PROGRAM}"):
        if not program.with_name(program.name.removesuffix(_PROGRAM) + _TIME).exists():
            program.unlink(missing_ok=True)
