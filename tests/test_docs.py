"""Every Python block of the README and the docs runs, and prints what the page says it prints.

The blocks of a page run in order in one namespace. A ```text block right after a ```python block is its output;
`...` in it stands for anything. `make golden` rewrites such blocks, save those that hold `...`.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.golden import UpdateMode

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_and_print_what_it_says(page: Path) -> None:
    original = page.read_text()
    namespace: dict[str, object] = {"__name__": page.stem}
    updated = original
    for match in BLOCK.finditer(original):
        code, expected = match.groups()
        line = original.count("\n", 0, match.start(1))
        printed = run("\n" * line + code, page.name, namespace)
        if expected is not None and not matches(printed, expected):
            if not UpdateMode.on:
                raise AssertionError(f"{page.name}:{line} printed\n{printed}\nbut the page says\n{expected}")
            updated = updated.replace(match[0], f"```python\n{code}```\n\n```text\n{printed}```\n")
    if updated != original:
        page.write_text(updated)


def run(code: str, name: str, namespace: dict[str, object]) -> str:
    """What the code prints. An exception on purpose is caught by the block itself."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, name, "exec"), namespace)
    return out.getvalue()


def matches(printed: str, expected: str) -> bool:
    """Whether the output is what was expected, `...` standing for anything."""
    pattern = ".*?".join(re.escape(part) for part in expected.split("..."))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None
