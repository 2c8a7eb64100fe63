"""Text of rich's tables, as it is printed."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def console(width: int = 120, **options: bool | int) -> tuple[Console, io.StringIO]:
    """Return a console, and what it writes to."""
    file = io.StringIO()
    return Console(file=file, width=width, **options), file  # type: ignore[arg-type]


def printed(*shown: RenderableType, width: int = 120) -> str:
    made, file = console(width)
    for one in shown:
        made.print(one)
    return file.getvalue()


def lines_of(text: str) -> list[str]:
    """Return the lines that are not empty."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]
