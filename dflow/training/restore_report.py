"""Report of `dflow.restore`: how a checkpoint and the variables agree and differ."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

#: Most lines of a table in a message.
_LINES = 60

#: The kinds of difference between a checkpoint and variables.
DIFFERENCES = ("missing", "unexpected", "changed")


@dataclass(frozen=True)
class RestoreReport:
    """Result of `restore`, by the names of the arrays in the checkpoint; its `str` is a table.

    restored    arrays whose values are now in the variables
    missing     arrays of variables that the checkpoint does not have, with the variable's type
    unexpected  arrays of the checkpoint without a variable, with their type
    changed     arrays of another shape, dtype or algorithm than the variable: the checkpoint's type and the variable's
    converted   arrays of another dtype, as in `changed`, which `cast` converted
    """

    restored: tuple[str, ...]
    missing: Mapping[str, str]
    unexpected: Mapping[str, str]
    changed: Mapping[str, tuple[str, str]]
    converted: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def refused(self, ignored: Iterable[str]) -> list[str]:
        """Return the kinds of difference found, without the ignored ones."""
        return [way for way in DIFFERENCES if getattr(self, way) and way not in set(ignored)]

    def __str__(self) -> str:
        rows = [
            *(("missing", name, "-", type) for name, type in self.missing.items()),
            *(("unexpected", name, type, "-") for name, type in self.unexpected.items()),
            *(("changed", name, saved, held) for name, (saved, held) in self.changed.items()),
            *(("converted", name, saved, held) for name, (saved, held) in self.converted.items()),
        ]
        if not rows:
            return f"{len(self.restored)} arrays restored, and no others"
        table = Table("", "array", "in the checkpoint", "in the variables")
        for row in rows[:_LINES]:
            table.add_row(*row)
        text = io.StringIO()
        longest = max(len(name) for _, name, *_ in rows)
        Console(file=text, width=max(80, longest + 70), color_system=None, markup=False).print(table)
        more = f"... and {len(rows) - _LINES} more\n" if len(rows) > _LINES else ""
        lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
        return f"{lines}\n{more}{len(self.restored)} arrays fit"
