"""Writing a file that appears whole or not at all, and replaces an older one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write the file. A reader sees all of it or the older one, also while other processes write it too."""
    place = Path(path)
    part = place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(data)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
