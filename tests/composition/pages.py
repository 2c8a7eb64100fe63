"""The page of the docs that shows the recorded outcomes."""

from __future__ import annotations

from tests.composition.kinds import KINDS
from tests.composition.refusals import RIGHT
from tests.composition.table import USES

HEAD = """# What works together

Each part of dflow is used with every other part by a test: a kind of state in a use, compared with the same program in
plain JAX and NumPy. A pair is right, or refused with an error whose remedy the test follows. The table is written from
the outcomes: `yes` is right, and a number is a refusal with its remedy below. `make test` runs a part of the pairs,
which has each kind and each use, and `make nightly` all of them.

The kinds: {kinds}.
"""


def page(cells: dict[str, dict[str, str]]) -> str:
    """Return the text of the page."""
    families: dict[str, list[str]] = {}
    for kind in KINDS.values():
        families.setdefault(kind.family, []).append(kind.name)
    remedies: list[str] = []
    shown = "; ".join(
        f"{family} ({', '.join(names)})" if len(names) > 1 else family for family, names in families.items()
    )
    lines = [HEAD.format(kinds=shown)]
    for heading in dict.fromkeys(use.heading for use in USES):
        lines += [
            f"## {heading[0].upper()}{heading[1:]}",
            "",
            f"| | {' | '.join(families)} |",
            "|---" * (len(families) + 1) + "|",
        ]
        for use in (use for use in USES if use.heading == heading):
            found = [_cell(cells[use.name], names, remedies) for names in families.values()]
            lines.append(f"| {use.name} | {' | '.join(found)} |")
        lines.append("")
    lines += ["## Remedies", ""]
    lines += [f"{number}. {remedy}" for number, remedy in enumerate(remedies, 1)]
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, str], names: list[str], remedies: list[str]) -> str:
    by_outcome: dict[str, list[str]] = {}
    for name in names:
        outcome = found[name]
        if outcome != RIGHT and outcome not in remedies:
            remedies.append(outcome)
        mark = "yes" if outcome == RIGHT else f"{remedies.index(outcome) + 1}"
        by_outcome.setdefault(mark, []).append(name)
    if len(by_outcome) == 1:
        return next(iter(by_outcome))
    common = max(by_outcome, key=lambda mark: len(by_outcome[mark]))
    others = [f"{', '.join(members)}: {mark}" for mark, members in by_outcome.items() if mark != common]
    return "; ".join([common, *others])
