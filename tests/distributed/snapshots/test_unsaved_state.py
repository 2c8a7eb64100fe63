"""State that a process has made and that may be in no snapshot: a return has it made again, until a snapshot has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dflow.distributed.snapshots.unsaved_state import UnsavedState
from dflow.tracing.errors import TaskLost


class Maker:
    """Makes state, and notes it as a process does; `made` has what it made again."""

    def __init__(self) -> None:
        self.state, self.made = UnsavedState(), list[str]()
        self.fails = False

    def make(self, name: str) -> None:
        self.state.note(name, self.state.epoch, name, self.again)

    def again(self, names: Sequence[Any]) -> None:
        self.state.make_again()  # as each request does
        if self.fails:
            raise TaskLost("ps:0 was lost")
        self.made += names
        for name in names:
            self.make(name)


def test_freed_state_is_made_again_once_in_its_order() -> None:
    maker = Maker()
    for name in ("a", "b", "c"):
        maker.make(name)
    maker.state.make_again()
    assert not maker.made
    maker.state.forget("b")
    maker.state.returned(1)
    for _ in range(2):
        maker.state.make_again()
        assert maker.made == ["a", "c"]


def test_state_is_kept_until_the_capture_of_a_snapshot_must_have_seen_it() -> None:
    maker = Maker()
    maker.make("a")
    maker.state.snapshot_complete()
    maker.make("b")
    maker.state.returned(1)
    maker.state.make_again()
    assert maker.made == ["a", "b"], "the capture may have been before"
    maker.state.snapshot_complete()
    maker.state.snapshot_complete()
    maker.state.returned(2)
    maker.state.make_again()
    assert maker.made == ["a", "b"]


def test_state_whose_creation_a_return_overtakes_is_made_again() -> None:
    maker = Maker()
    before = maker.state.epoch
    maker.state.returned(1)
    maker.state.note("a", before, "a", maker.again)
    for _ in range(2):
        maker.state.snapshot_complete()
    maker.state.make_again()
    assert maker.made == ["a"]


def test_a_resource_that_could_not_be_made_again_is_tried_again() -> None:
    maker = Maker()
    maker.make("a")
    maker.state.returned(1)
    maker.fails = True
    with pytest.raises(TaskLost):
        maker.state.make_again()
    maker.fails = False
    maker.state.make_again()
    assert maker.made == ["a"]
