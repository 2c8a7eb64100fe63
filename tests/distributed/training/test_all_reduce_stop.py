"""SIGTERM to one of the processes that compute together: all end after the same step, with a checkpoint of it."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.distributed.collectives.collectives import Collectives
from dflow.distributed.process.termination import STATUS, Terminated
from dflow.distributed.training.open_runs import OpenRuns
from dflow.lowering.files.array_files import read_arrays
from dflow.tracing.errors import CheckpointError
from dflow.training.checkpoint_manager import CheckpointManager

pytestmark = [
    pytest.mark.usefixtures("default_termination"),
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
]


class Counted:
    """A step that counts its calls, in a variable of `AllReduce` in this process; `end` is called in step 5."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.strategy = dflow.distributed.AllReduce(dflow.connect())
        with self.strategy.variables():
            self.count = dflow.Variable(jnp.zeros((), jnp.int32), name="counted")
        self._add = dflow.jit(self.count.assign_add)
        self._end = end

    def step(self, number: int) -> jax.Array:
        if number == 5:
            self._end()
        return self._add(1)

    def train(self, folder: Path, steps: int = 10) -> None:
        """Train with a checkpoint after each fourth step."""
        with dflow.CheckpointManager(folder, self.count, every=4) as manager:
            first = manager.next_step
            run = self.strategy.run(self.step, lambda number: number, steps=steps, first=first)
            for number, _ in enumerate(run, first):
                manager.step(number)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_loop_in_one_process_ends_with_a_checkpoint_and_goes_on_from_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        Counted(terminate).train(tmp_path)
    assert ended.value.code == STATUS == 143
    assert read_arrays(tmp_path / "step_5").read({"counted": None})["counted"] == 6
    again = Counted(lambda: pytest.fail("step 5 is done again"))
    again.train(tmp_path)
    assert int(again.count.read()) == 10


def test_a_trainer_saves_the_steps_that_are_done(tmp_path: Path) -> None:
    def train(end: Callable[[], object]) -> Counted:
        counted = Counted(end)
        with dflow.CheckpointManager(tmp_path, counted.count, every=4) as manager:
            trainer = dflow.Trainer(counted.step, counted.strategy, checkpoints=manager)
            trainer.run(lambda number: number, steps=10)
        return counted

    with pytest.raises(SystemExit):
        train(terminate)
    assert (tmp_path / "step_5").is_dir()
    assert int(train(lambda: pytest.fail("step 5 is done again")).count.read()) == 10


def test_a_last_checkpoint_that_fails_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: CheckpointManager, *given: Any, **options: Any) -> None:
        raise CheckpointError("no room")

    def end() -> None:
        monkeypatch.setattr(CheckpointManager, "_begin", refuse)
        terminate()

    with pytest.raises(SystemExit):
        Counted(end).train(tmp_path)
    assert "the last step was not saved: no room" in caplog.text


class Group:
    """A group of two processes; the other one says the same, but stops before step 3."""

    names = "worker:0", "worker:1"

    def __init__(self) -> None:
        self.points: list[str] = []

    def exchange(self, point: str, word: str) -> tuple[str, str]:
        self.points.append(point)
        stops = point.startswith("step 3 ")
        return word, word.replace('"stops":false', '"stops":true') if stops else word

    def computing(self) -> Any:
        return nullcontext()


@pytest.fixture
def cluster() -> Any:
    alone: Any = dflow.connect()
    cluster: Any = SimpleNamespace(
        group=Group(),
        is_standalone=False,
        store=alone.store,
        task=alone.task,
        coordinator=SimpleNamespace(tell=lambda message: None, leave=lambda reason: pytest.fail("it has left")),
        steps=SimpleNamespace(undone=0),
    )
    parts = {OpenRuns: OpenRuns(cluster), Collectives: SimpleNamespace(group=cluster.group, programs=None)}
    cluster.part = parts.__getitem__
    return cluster


def test_all_end_before_the_step_that_one_of_them_stops_at(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = dflow.distributed.AllReduce(cluster).run(lambda x: x, lambda x: x, steps=9, name="run")
    assert list(itertools.islice(run, 3)) == [0, 1, 2]
    with pytest.raises(Terminated) as ended:
        next(run)
    # The process stays in the cluster: the others may still save.
    assert ended.value.is_agreed
    assert ended.value.reason == "SIGTERM has come to worker:1"
    assert "run 'run' ends after 3 of 9 steps: SIGTERM has come to worker:1" in caplog.text
    assert cluster.group.points == [f"step {number} of run 'run'" for number in range(4)]


def test_the_processes_agree_at_the_end_of_the_run_too(cluster: Any) -> None:
    run = dflow.distributed.AllReduce(cluster).run(lambda x: x, lambda x: x, steps=2, name="run")
    assert list(run) == [0, 1]
    assert cluster.group.points == ["step 0 of run 'run'", "step 1 of run 'run'", "the end of run 'run'"]
