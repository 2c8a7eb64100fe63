"""Processes of a group restore the same checkpoint, or none of them restores any; members are threads here."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import pytest

import dflow
from dflow.lowering.files.array_manifest import MANIFEST
from dflow.training import group_saving, save_roles
from tests.dflow.training.managed_run import Run, saved

pytestmark = [
    pytest.mark.once,
    # Both members are in this process, where equal names are those of two variables.
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
]
DEADLINE_S = 30.0


class Group:
    """The group of two members, each a thread, whose words meet at a barrier."""

    names = "worker:0", "worker:1"

    def __init__(self) -> None:
        self._member = threading.local()
        self._barrier = threading.Barrier(2, timeout=DEADLINE_S)
        self._given: list[tuple[str, str]] = [("", "")] * 2

    @property
    def rank(self) -> int:
        rank: int = self._member.rank
        return rank

    def exchange(self, name: str, word: str, *, channel: str = "") -> tuple[str, ...]:
        self._given[self.rank] = name.replace(f"folder{self.rank}", "folder"), word
        self._barrier.wait()
        points, words = zip(*self._given, strict=True)
        self._barrier.wait()
        assert len({*points}) == 1, points
        return words

    def both(self, work: Callable[[int], str]) -> list[str]:
        """Return what the members' work gives, or their errors."""

        def done(rank: int) -> str:
            self._member.rank = rank
            try:
                return work(rank)
            except dflow.DflowError as error:
                return f"{type(error).__name__}: {error}"

        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(done, range(2))]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The folder that each member sees, with the same checkpoints of two steps."""
    found = [tmp_path / "folder0", tmp_path / "folder1"]
    with (run := Run()).manager(found[0]) as manager:
        for step in (1, 3):
            saved(manager, run, step)
    shutil.copytree(*found)
    return found


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    found = Group()
    monkeypatch.setattr(save_roles, "current_group", lambda: found)
    return found


def damage(place: Path) -> None:
    (place / MANIFEST).write_text("{")


def remove_all(place: Path) -> None:
    damage(place)
    damage(place.with_name("step_1"))


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (damage, ["1", "1"]),
        (remove_all, ["DamagedCheckpoint", "DamagedCheckpoint"]),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_member_cannot_read_is_restored_by_none(
    folders: list[Path], group: Group, rank: int, harm: Callable[[Path], None], expected: list[str]
) -> None:
    harm(folders[rank] / "step_3")
    runs = [Run(), Run()]

    def work(rank: int) -> str:
        with runs[rank].manager(folders[rank]):
            return str(runs[rank].last)

    assert [one.partition(":")[0] for one in group.both(work)] == expected
    assert len({run.last for run in runs}) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_does_not_fit_one_member_is_restored_by_none(
    folders: list[Path], group: Group, rank: int
) -> None:
    runs = [Run(), Run()]
    runs[rank].seen = dflow.Variable(jnp.full(5, -1.0))
    # The other one cannot read it, which alone would have both try the one before.
    damage(folders[1 - rank] / "step_3")

    def work(rank: int) -> str:
        runs[rank].manager(folders[rank])
        return "restored"

    found = group.both(work)
    assert [one.partition(":")[0] for one in found] == ["CheckpointError"] * 2
    assert all("f32[5]" in one for one in found), found
    assert [run.last for run in runs] == [-1, -1]


def test_members_that_see_other_values_of_a_step_are_told(
    folders: list[Path], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of machines with folders of their own at one path, from other runs."""
    run = Run()
    run.set(7)
    dflow.save(folders[1] / "step_3", {"seen": run.seen}, overwrite=True)
    monkeypatch.setattr(group_saving, "current_group", lambda: group)
    monkeypatch.setattr(group_saving, "is_of_group", lambda variable: True)
    found = group.both(lambda rank: str(Run().manager(folders[rank], every=1).resumed))
    for one in found:
        assert "StrategyError: dflow.restore(" in one, one
        assert "expected the same variables with the same values on all workers, got as variable 0: worker:0: " in one
        assert one.endswith("restore from the same checkpoint on all workers")


def test_a_checkpoint_that_worker_0_alone_sees_is_refused_and_one_that_it_lacks_is_passed_over(
    folders: list[Path], group: Group
) -> None:
    def work(rank: int) -> str:
        run = Run()
        run.manager(folders[rank])
        return str(run.last)

    shutil.rmtree(folders[1] / "step_3")
    for one in group.both(work):
        assert "CheckpointError: " in one, one
        assert "expected the same checkpoints on all workers, got no step_3 on worker:1" in one, one
        assert one.endswith("give a folder that all workers see, as on a shared file system")
    (folders[0] / "step_3").rename(folders[1] / "step_3")
    assert group.both(work) == ["1", "1"]
