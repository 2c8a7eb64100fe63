"""The folder for a process's dumps of events, and writing a file atomically."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dflow.tracing.environment import read

RUN_FOLDER_VARIABLE = "DFLOW_RUN_DIR"


def run_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder for dumps of events: that in DFLOW_RUN_DIR, else `dflow-<user id>` among the temporary files.

    It need not exist.
    """
    named = read(RUN_FOLDER_VARIABLE, environment)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"dflow-{os.geteuid()}"


def write_whole_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write the file. A reader sees all of it or the older file, even while several processes write it."""
    location = Path(path)
    part = location.with_name(f".{location.name}.{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(data)
        part.replace(location)
    finally:
        part.unlink(missing_ok=True)
