"""Each kind of state in each use is right, or refused with a remedy that works."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.composition import uses_in_process, uses_of_files, uses_on_a_cluster
from tests.composition.kind import Kind, Pair, Room, Use
from tests.composition.kinds import KINDS
from tests.composition.refusals import RIGHT, judged
from tests.composition.uses_in_processes import RUNS, found_of, job
from tests.effort import factor
from tests.golden import UpdateMode

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


_CHOSEN = {name: list(filter(is_installed, chosen(number))) for number, name in enumerate(RUNS, len(_LOCAL))}
#: One job for all uses, whose processes take longer to start than a few pairs; one for each use with all kinds.
_JOB = job(_CHOSEN)
_TOGETHER = [
    Use(name, "by processes together", run, _JOB if PART > 1 else job({name: _CHOSEN[name]}))
    for name, run in RUNS.items()
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
        return found_of(use.name, kind, room)
    return judged(use.run, Pair(kind, use.name), *(() if room is None else (room,)))


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


os.environ.setdefault("KERAS_BACKEND", "jax")  # read by Keras when it is first imported

#: A job of processes runs all its pairs in the first test of them, on one Python of CI.
PAGE = Path(__file__).parents[2] / "docs/composition.md"
PAIRS = [
    pytest.param(use, KINDS[name], id=f"{use.name}-{name}", marks=[pytest.mark.once] if use in _TOGETHER else [])
    for number, use in enumerate(USES)
    for name in chosen(number)
]


@pytest.fixture(scope="module")
def rooms() -> Iterator[Callable[[Room], Any]]:
    """Opens the room of a use, which closes the one before: pairs of a room follow each other."""
    with contextlib.ExitStack() as stack:
        last: list[Any] = [None, None]

        def open_room(room: Room) -> Any:
            if room is not last[0]:
                stack.close()
                last[:] = room, stack.enter_context(room())
            return last[1]

        yield open_room


# Each pair compiles another function that is written at the same line.
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*makes a new function of it each time:dflow.RetraceWarning")
@pytest.mark.parametrize(("use", "kind"), PAIRS)
def test_a_pair_is_right_or_refused_with_a_remedy_that_works(
    use: Use, kind: Kind, rooms: Callable[[Room], Any]
) -> None:
    if kind.library is not None:
        pytest.importorskip(kind.library, reason=f"needs {kind.library}")
    found = outcome(use, kind, rooms(use.room))
    if UpdateMode.on:
        record(use, kind, found)
    assert found == cells()[use.name].get(kind.name), "run make composition, and read the difference"


@pytest.mark.timeout(900)
def test_every_run_has_each_use_and_each_kind() -> None:
    kinds = [chosen(number) for number in range(len(USES))]
    assert all(kinds)
    assert set().union(*kinds) == set(KINDS)


@pytest.mark.timeout(900)
def test_the_docs_show_the_recorded_outcomes() -> None:
    known = cells()
    assert set(known) == {use.name for use in USES}
    if UpdateMode.on:
        PAGE.write_text(page(known))
    assert PAGE.read_text() == page(known)
