"""Atomic writing of a file, which replaces an older one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write the file. A reader sees all of it or the older file, even while several processes write it."""
    place = Path(path)
    part = place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(data)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
