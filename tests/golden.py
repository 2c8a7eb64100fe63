"""Golden pairs: files of graphs before and after, and the check that compares or rewrites them.

A file `x.graphs` has some lines of explanation, then cases:

    === drops an unused node
    input graph
    ---
    expected graph

`make golden` rewrites each expected graph with the code's result; read the diff before committing it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

CASE, ARROW = "=== ", "---"


class UpdateMode:
    """Whether `check` rewrites differing graphs; set from --update-golden once per test run."""

    on = False


@dataclass(frozen=True)
class GoldenCase:
    """One case of a golden file, with its texts free of blank lines at either end."""

    path: Path
    name: str
    input: str
    expected: str


def golden_cases(path: Path) -> list[ParameterSet]:
    """Return the cases of `path` for `pytest.mark.parametrize`, each under its name."""
    return [pytest.param(case, id=case.name) for case in read_golden(path)]


def read_golden(path: Path) -> list[GoldenCase]:
    """Read every case of `path`; a case without a `---` line has an empty expected graph."""
    return split_golden(path)[1]


def split_golden(path: Path) -> tuple[str, list[GoldenCase]]:
    """Read the explanation at the head of `path`, and its cases."""
    head, *blocks = ("\n" + path.read_text()).split("\n" + CASE)
    cases = [parse_case(path, block) for block in blocks]
    names = [case.name for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path.name}: more than one case is called {sorted(twice)}")
    if not cases:
        raise ValueError(f"{path.name}: no case; a case begins with a line {CASE + 'name'!r}")
    return head.strip("\n"), cases


def parse_case(path: Path, block: str) -> GoldenCase:
    """Read one case from the text after its `=== `."""
    name, _, body = block.partition("\n")
    lines = body.splitlines()
    arrows = [number for number, line in enumerate(lines) if line.rstrip() == ARROW] or [len(lines)]
    if len(arrows) > 1:
        raise ValueError(f"{path.name}: case {name.strip()!r} has {len(arrows)} lines {ARROW!r}, and should have one")
    before, after = lines[: arrows[0]], lines[arrows[0] + 1 :]
    return GoldenCase(path, name.strip(), "\n".join(before).strip("\n"), "\n".join(after).strip("\n"))


def check(case: GoldenCase, actual: str) -> None:
    """Assert that `actual` is the expected graph of `case`; under --update-golden rewrite it."""
    actual = actual.strip("\n")
    if actual == case.expected:
        return
    if UpdateMode.on:
        rewrite(case, actual)
        return
    diff = difflib.unified_diff(case.expected.splitlines(), actual.splitlines(), "expected", "actual", lineterm="")
    pytest.fail(
        f"{case.path.name}: case {case.name!r} differs; if the new graph is right, run `make golden`\n"
        + "\n".join(diff),
        pytrace=False,
    )


def rewrite(case: GoldenCase, actual: str) -> None:
    """Replace the expected graph of `case` by `actual`, and keep the rest of its file."""
    head, cases = split_golden(case.path)
    blocks = [head] if head else []
    for each in cases:
        expected = actual if each.name == case.name else each.expected
        blocks.append(f"{CASE}{each.name}\n{each.input}\n{ARROW}\n{expected}")
    case.path.write_text("\n\n".join(blocks) + "\n")
