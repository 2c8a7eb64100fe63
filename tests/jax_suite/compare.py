"""Differences between the two runs of a test file, listed with a reason or not."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.jax_suite.process import FileRun, Outcome


@dataclass(frozen=True)
class Exceptions:
    """Patterns of test names, with `*` for any text, and the reasons why those tests may differ."""

    reasons: Mapping[str, str]

    @classmethod
    def of(cls, path: Path, suite: str) -> Exceptions:
        """Return the patterns of one suite in a TOML file with a table for each. Raises ValueError for an entry
        without reason.
        """
        reasons: dict[str, str] = tomllib.loads(path.read_text()).get(suite, {})
        if empty := [pattern for pattern, reason in reasons.items() if not reason.strip()]:
            raise ValueError(f"{path} gives no reason for {', '.join(empty)}; say why these tests may differ")
        return cls(reasons)

    def pattern_of(self, test: str) -> str | None:
        return next((pattern for pattern in self.reasons if _matches(pattern, test)), None)

    def stale(self, compared: Sequence[FileComparison], *, selected: bool = False) -> list[str]:
        """Return the patterns, of the compared files, whose tests no longer differ.

        If pytest ran `selected` tests of a file, only the patterns of these tests.
        """
        used = {self.pattern_of(test) for one in compared for test in one.differing}
        ran = [test for one in compared for test in (one.plain.tests if selected else (one.file,))]

        def covers(pattern: str) -> str:
            return pattern if selected else pattern.split("::")[0]

        return [p for p in self.reasons if p not in used and any(_matches(covers(p), name) for name in ran)]


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL) is not None


@dataclass(frozen=True)
class FileComparison:
    """Both runs of one file. Only tests that pass with `jax.jit` are compared."""

    file: str
    plain: FileRun
    replaced: FileRun

    @cached_property
    def passed(self) -> list[str]:
        return [test for test, outcome in self.plain.tests.items() if outcome.outcome == "passed"]

    @cached_property
    def differing(self) -> dict[str, Outcome]:
        """Tests that do not pass with `dflow.jit`, with their outcomes there."""
        missing = Outcome("not run", self.replaced.trouble or "no test of this name")
        ends = {test: self.replaced.tests.get(test, missing) for test in self.passed}
        return {test: outcome for test, outcome in ends.items() if outcome.outcome != "passed"}

    @property
    def traced(self) -> int:
        """Number of compared tests with a trace of a function by `dflow.jit`."""
        return sum(1 for test in self.passed if test in self.replaced.tests and self.replaced.tests[test].traces)

    def unlisted(self, exceptions: Exceptions) -> list[str]:
        """Tests that differ without a listed reason."""
        return [test for test in self.differing if exceptions.pattern_of(test) is None]

    def as_json(self, exceptions: Exceptions) -> dict[str, Any]:
        differing = {
            test: {
                "outcome": outcome.outcome,
                "error": outcome.error,
                "exception": exceptions.reasons.get(exceptions.pattern_of(test) or ""),
            }
            for test, outcome in self.differing.items()
        }
        return {
            "passed_with_jax": len(self.passed),
            "passed_with_dflow": len(self.passed) - len(self.differing),
            "traced_by_dflow": self.traced,
            "outcomes_with_jax": dict(Counter(one.outcome for one in self.plain.tests.values())),
            "outcomes_with_dflow": dict(Counter(one.outcome for one in self.replaced.tests.values())),
            "trouble_with_jax": self.plain.trouble,
            "trouble_with_dflow": self.replaced.trouble,
            "differing": differing,
        }


def table(compared: Sequence[FileComparison], exceptions: Exceptions) -> str:
    """A line for each file and one for all: tests passed with jax.jit, with dflow.jit, differing, listed, traced."""
    rows = [
        (one.file, len(one.passed), len(one.differing), len(one.unlisted(exceptions)), one.traced) for one in compared
    ]
    totals = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    rows.append(("in all", totals[0], totals[1], totals[2], totals[3]))
    width = max(len(row[0]) for row in rows)
    lines = [f"{'file':{width}}  jax.jit  dflow.jit  differ  listed  traced"]
    for name, passed, differing, unlisted, traced in rows:
        numbers = f"{passed:7}  {passed - differing:9}  {differing:6}  {differing - unlisted:6}  {traced:6}"
        lines.append(f"{name:{width}}  {numbers}")
    return "\n".join(lines)


def differences(compared: Sequence[FileComparison], exceptions: Exceptions) -> str:
    """Return each differing test, with the last line of its error and the listed reason."""
    lines = []
    for one in compared:
        for test, outcome in one.differing.items():
            lines.append(f"{outcome.outcome}: {test}\n  {outcome.error}")
            if (pattern := exceptions.pattern_of(test)) is not None:
                lines.append(f"  listed: {exceptions.reasons[pattern]}")
    return "\n".join(lines)
