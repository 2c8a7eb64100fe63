"""The line of the user's code that an error names."""

from __future__ import annotations

from pathlib import Path


def line_of(error: BaseException, file: str) -> str:
    """Return the text of the first line of `file` that the message names after "at". Raises AssertionError."""
    name = Path(file).name
    lines = [line for line in str(error).splitlines() if line.strip().startswith("at ") and name in line]
    assert lines, error
    return Path(file).read_text().splitlines()[int(lines[0].rpartition(":")[2]) - 1].strip()
