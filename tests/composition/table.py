"""The table of all pairs: its uses, the part of it that each test run has, and what came of each pair."""

from __future__ import annotations

import fcntl
import importlib.util
import json
from pathlib import Path
from typing import Any

from tests.composition import uses_in_process, uses_in_processes, uses_of_files, uses_on_a_cluster
from tests.composition.kind import Kind
from tests.composition.kinds import KINDS
from tests.composition.refusals import RIGHT, judged
from tests.composition.use import Pair, Use
from tests.effort import factor

#: A test run has one pair of this number; `make nightly` has all.
PART = 1 if factor() > 1 else 27


def is_installed(kind: str) -> bool:
    """Whether the library that a kind needs is there."""
    library = KINDS[kind].library
    return library is None or importlib.util.find_spec(library) is not None


_LOCAL: list[Use] = [*uses_in_process.USES, *uses_on_a_cluster.USES, *uses_of_files.USES]


def chosen(use: int) -> list[str]:
    """Return the kinds that this test run has with use number `use`: a diagonal, so each use and each kind is in it."""
    return [name for number, name in enumerate(KINDS) if (use + 2 * number) % PART == 0]


_TOGETHER = [
    Use(name, "by processes together", run, uses_in_processes.job(name, list(filter(is_installed, chosen(number)))))
    for number, (name, run) in enumerate(uses_in_processes.RUNS.items(), len(_LOCAL))
]

#: Every use, in the order of the docs: a new one is an entry of one of these files.
USES: list[Use] = [*_LOCAL, *_TOGETHER]

#: The kinds, and the pairs that are refused: the remedy of each, by use and kind. All other pairs are right.
CELLS = Path(__file__).with_name("cells.json")


def cells() -> dict[str, dict[str, str]]:
    """Read the recorded outcome of each use and kind: RIGHT, or the remedy of a refusal."""
    found = json.loads(CELLS.read_text())
    return {use: dict.fromkeys(found["kinds"], RIGHT) | refused for use, refused in found["refused"].items()}


def record(use: Use, kind: Kind, outcome: str) -> None:
    """Write an outcome into the recorded ones, in the order of the table."""
    with open(__file__) as lock:  # several runs may each do a part
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = cells()
        known.setdefault(use.name, {})[kind.name] = outcome
        refused = {
            one.name: {name: remedy for name in KINDS if (remedy := known[one.name].get(name, RIGHT)) != RIGHT}
            for one in USES
            if one.name in known
        }
        new = CELLS.with_suffix(".new")
        new.write_text(json.dumps({"kinds": [*KINDS], "refused": refused}, indent=1) + "\n")
        new.replace(CELLS)  # which another run may be reading


def outcome(use: Use, kind: Kind, room: Any) -> str:
    """Run a pair, or look up what a job of processes has found of it; return RIGHT, or the remedy of its refusal."""
    if use in _TOGETHER:
        return uses_in_processes.found_of(kind, room)
    return judged(use.run, Pair(kind, use.name), *(() if room is None else (room,)))
