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

_SETTINGS = {
    # With a limit JAX also locks the folder, and no process reads a program that is half written.
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(MAX_BYTES),
    # A step has many small programs, and JAX by default keeps a program only if it compiles for a second.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for a task with this environment; None if the environment decides itself."""
    if FOLDER_VARIABLE in environment or SWITCH_VARIABLE in environment:
        return None
    caches = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME") or "~", ".cache")
    return Path(caches).expanduser() / "dflow" / "compiled" / (platform.node() or "host")


def cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Make the folder, unless it is there, and return the variables for JAX to use it; none if others may write there.

    environment  that of the task
    """
    folder = cache_folder(environment)
    try:
        if folder is None:
            return {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # the second one from `expanduser`, for a user without a home
        return {}
    is_private = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return {FOLDER_VARIABLE: str(folder), **_SETTINGS} if is_private else {}
