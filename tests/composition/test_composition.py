"""Each kind of state in each use is right, or refused with a remedy that works."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.composition.kind import Kind
from tests.composition.kinds import KINDS
from tests.composition.pages import page
from tests.composition.table import USES, cells, chosen, outcome, record
from tests.composition.use import Room, Use
from tests.golden import UpdateMode

os.environ.setdefault("KERAS_BACKEND", "jax")  # read by Keras when it is first imported

#: A job of processes runs all chosen kinds of a use in the first test of it.
pytestmark = pytest.mark.timeout(900)
PAGE = Path(__file__).parents[2] / "docs/composition.md"
PAIRS = [
    pytest.param(use, KINDS[name], id=f"{use.name}-{name}")
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


def test_every_run_has_each_use_and_each_kind() -> None:
    kinds = [chosen(number) for number in range(len(USES))]
    assert all(kinds)
    assert set().union(*kinds) == set(KINDS)


def test_the_docs_show_the_recorded_outcomes() -> None:
    known = cells()
    assert set(known) == {use.name for use in USES}
    if UpdateMode.on:
        PAGE.write_text(page(known))
    assert PAGE.read_text() == page(known)
