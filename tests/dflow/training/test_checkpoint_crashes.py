"""A disk that refuses any file operation: the newest good checkpoint is found and is whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dflow
from tests.dflow.training.managed_run import Run, saved, steps_in
from tests.disk_faults import FAULTS
from tests.effort import examples

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

RULES: dict[str, Any] = {"keep": 2, "best": ("loss", 1, "min")}


def save_five(manager: dflow.CheckpointManager, run: Run) -> list[int]:
    """Save five steps and close the manager; return those whose save reported no error."""
    done = []
    for step, loss in enumerate([1.0, 3.0, 0.5, 2.0, 4.0]):
        with suppress(dflow.CheckpointError):
            saved(manager, run, step, loss=loss)
            done.append(step)
    manager.close()
    return done


def check_resumed(folder: Path, done: list[int], attempted: int) -> None:
    """Check that the newest checkpoint is restored, that all are whole, and that the next save leaves nothing else."""
    run = Run()
    with run.manager(folder, **RULES) as manager:
        steps = steps_in(manager)
        assert (manager.resumed, run.last) == ((steps[-1], steps[-1]) if steps else (None, -1))
        assert max(done, default=-1) <= max(steps, default=-1) <= attempted
        for checkpoint in manager.checkpoints:
            dflow.restore(checkpoint.path, {"seen": run.seen})
            assert run.last == checkpoint.step
        saved(manager, run, 10, loss=9.0)
    names = {"runs.json", *(f"step_{step}" for step in steps_in(manager))}
    assert set(os.listdir(folder)) - {"runs.new"} == names
    assert len(names) <= 4


@settings(max_examples=examples(40))
@given(first=st.integers(1, 200), count=st.sampled_from([1, 2, 10_000]))
def test_after_a_fault_at_any_operation_the_newest_checkpoint_is_whole(
    first: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, run = tmp_path_factory.mktemp("run"), Run()
    manager = run.manager(folder, **RULES)
    with FAULTS.within(folder, first, count):
        done = save_five(manager, run)
    assert run.last == 4
    check_resumed(folder, done, attempted=4)


@settings(max_examples=examples(15))
@example(first=14, count=1)
@given(first=st.integers(1, 17), count=st.sampled_from([1, 2, 10_000]))
def test_after_a_fault_while_it_resumes_a_manager_raises_or_resumes(
    first: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, run = tmp_path_factory.mktemp("run"), Run()
    done = save_five(run.manager(folder, **RULES), run)
    again = Run()
    with FAULTS.within(folder, first, count), suppress(dflow.CheckpointError):
        again.manager(folder, **RULES).close()
    assert again.last in (-1, *done)
    damaged = [name for name in os.listdir(folder) if name.endswith(".damaged")]
    for name in damaged:  # it could not be read then; nothing of it is deleted
        os.rename(folder / name, folder / name.removesuffix(".damaged"))
    check_resumed(folder, done, attempted=4)
