"""A manager saves beside training, resumes from the newest good checkpoint, and raises what went wrong."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.lowering.files import array_manifest, atomic_directory
from dflow.training import checkpoint_manager
from dflow.training.save_schedule import daly_interval_s
from tests.dflow.training.managed_run import DEADLINE_S, HandClock, Run, held_saves, saved, steps_in

#: A second set of variables with the same names stands for those of a restarted program.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")


def test_a_run_that_is_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path / "run", every=2) as manager:
        assert (manager.resumed, manager.next_step) == (None, 0)
        for step in range(6):
            run.set(step)
            assert manager.step(step) == (step % 2 == 0)
            manager.wait()
    again = Run()
    with again.manager(tmp_path / "run", every=2) as manager:
        assert (manager.resumed, manager.next_step, again.last) == (4, 5, 4)
        assert not manager.step(5)
        assert manager.step(6)


def test_the_values_of_one_moment_are_written_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = dflow.Variable(jnp.zeros(1000), name="one"), dflow.Variable(jnp.zeros(1000), name="two")

    @dflow.jit
    def step() -> None:
        for variable in (one, two):
            variable.assign_add(jnp.ones(1000))

    manager = dflow.CheckpointManager(tmp_path, [one, two], every=1)
    with manager, held_saves(monkeypatch) as may_write:
        step()
        assert manager.step(0)
        for number in range(1, 5):
            step()
            assert not manager.step(number)  # one save at a time
        may_write.set()
        manager.wait()
        assert manager.step(5)  # the one that was due meanwhile
    for number, value in ((0, 1.0), (5, 5.0)):
        dflow.restore(tmp_path / f"step_{number}", [one, two])
        assert {*one.read().tolist(), *two.read().tolist()} == {value}


def test_the_captured_values_are_freed_after_the_save(tmp_path: Path) -> None:
    state = dflow.Variable(jnp.zeros(12_345), name="freed after the save")
    step = dflow.jit(lambda: state.assign_add(jnp.ones(12_345)))
    with dflow.CheckpointManager(tmp_path, [state]) as manager:
        manager.save(0)
        step()
        manager.wait()
        gc.collect()
        assert len([one for one in jax.live_arrays() if one.shape == (12_345,)]) == 1


def test_a_manager_that_is_dropped_releases_the_folder(tmp_path: Path) -> None:
    manager = Run().manager(tmp_path)
    manager.save(0)
    manager.wait()
    del manager
    gc.collect()
    with Run().manager(tmp_path) as again:
        assert (again.resumed, again._record.failures) == (0, 0)


def test_time_decides_when_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, run = HandClock(monkeypatch), Run()
    with run.manager(tmp_path, every=timedelta(minutes=10)) as manager:
        assert manager.interval_s == 600
        clock.now_s += 599
        assert not manager.step(0)
        clock.now_s += 1
        assert manager.step(1)
        manager.wait()
        clock.now_s += 599
        assert not manager.should_save(2)
        assert not manager.step(2)


def test_the_automatic_interval_follows_the_measured_save_and_the_failures_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dflow")
    clock, run = HandClock(monkeypatch), Run()
    write, took_s = checkpoint_manager.whole_location, 8.0

    def slow(*args: Any, **options: Any) -> Any:
        clock.now_s += took_s
        return write(*args, **options)

    monkeypatch.setattr(checkpoint_manager, "whole_location", slow)
    manager = run.manager(tmp_path, mtbf=timedelta(seconds=10_000))
    assert manager.interval_s is None
    assert manager.step(0)
    manager.wait()
    assert manager.interval_s == pytest.approx((2 * 8 * 10_008) ** 0.5, rel=0.02)
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith(f"{tmp_path}: a save every 395 s, since a save takes 8 s, and a failure is expected every ")
    assert text.endswith("2.78 h (0 failures in 0.00222 h of runs that saved here, and one assumed in 2.78 h)")
    clock.now_s += 394 - 8
    assert not manager.step(1)
    clock.now_s += 2
    assert manager.step(2)
    manager.wait()
    for _ in range(3):  # each a failure: the run before was not closed
        manager._folder.release()
        manager = run.manager(tmp_path, mtbf=timedelta(seconds=10_000))
    assert manager.interval_s == daly_interval_s(8.0, 10_404 / 4)
    clock.now_s += 1000.0
    manager.close()
    assert json.loads((tmp_path / "runs.json").read_text()) == {
        "failures": 3,
        "ran_s": 1404.0,
        "save_s": [8.0, 8.0],
        "running": None,
        "running_s": 0.0,
    }


def test_an_exception_in_the_block_is_a_failure_of_the_run_and_an_interrupt_is_none(tmp_path: Path) -> None:
    for error, failures in ((ValueError, 1), (KeyboardInterrupt, 1), (ValueError, 2)):
        with pytest.raises(error), Run().manager(tmp_path):
            raise error
        with Run().manager(tmp_path):
            pass
        assert json.loads((tmp_path / "runs.json").read_text())["failures"] == failures


@pytest.mark.parametrize("text", ["{", "", '{"failures": -3}', '{"save_s": [-1.0]}', '{"ran_s": -404.0}', "\0" * 60])
def test_a_damaged_record_of_runs_is_begun_again(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs.json").write_text(text)
    with Run().manager(tmp_path) as manager:
        assert manager.interval_s is None
    assert json.loads((tmp_path / "runs.json").read_text())["failures"] == 0
    assert caplog.records[0].getMessage().startswith(f"{tmp_path / 'runs.json'} is damaged: ")


def test_a_failed_save_is_raised_at_the_next_call_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    manager = run.manager(tmp_path, every=1)
    saved(manager, run, 0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuses(*_: Any) -> None:
        raise full

    calls = (lambda: manager.step(9), lambda: manager.should_save(9), lambda: manager.save(9), manager.wait)
    for number, call in enumerate(calls, 1):
        with monkeypatch.context() as patch:
            patch.setattr(atomic_directory, "flush", refuses)
            run.set(number)
            manager.save(number)
            assert manager._save is not None
            assert manager._save._ended.wait(DEADLINE_S)
        says = (
            rf"step_{number}: expected to be saved, got: .*step_{number} cannot be written: No space left on device\n"
            r"  at .*test_checkpoint_manager.py:\d+\n  training and the older checkpoints are unharmed; remove"
        )
        with pytest.raises(dflow.CheckpointError, match=says):
            call()
        assert (steps_in(manager), run.last) == ([0], number)
        manager.wait()
    saved(manager, run, 4)  # the step that failed may be saved again
    manager.close()
    assert steps_in(manager) == [0, 4]
    assert sorted(os.listdir(tmp_path)) == ["runs.json", "step_0", "step_4"]


def test_leaving_the_block_raises_a_failed_save_or_adds_it_to_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(atomic_directory, "flush", refuses)
    with pytest.raises(dflow.CheckpointError, match="Read-only file system"), Run().manager(tmp_path) as manager:
        manager.save(0)

    def fails() -> None:
        with Run().manager(tmp_path) as manager:
            manager.save(0)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        fails()
    assert "Read-only file system" in caught.value.__notes__[0]
    Run().manager(tmp_path).close()  # the folder is released


def test_a_save_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock(monkeypatch)
    with Run().manager(tmp_path, timeout_s=5.0) as manager, held_saves(monkeypatch):
        manager.save(0)
        assert not manager.step(1)
        clock.now_s += 6
        with pytest.raises(dflow.DeadlineExceeded, match=r"step_0: expected the save to end within 5 s, and it still"):
            manager.step(2)
        with pytest.raises(dflow.DeadlineExceeded, match="within 5 s"):
            manager.wait()
        clock.now_s -= 6


def damage(checkpoint: Path) -> None:
    (part,) = (checkpoint / "seen").glob("c*")
    part.write_bytes(b"?" + part.read_bytes()[1:])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_a_checkpoint_that_this_process_cannot_open_is_not_set_aside(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        for step in (1, 2):
            saved(manager, run, step)

    def fail(path: Path, *_: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as failing:
        failing.setattr(array_manifest, "read_regular", fail)
        with pytest.raises(dflow.CheckpointError, match=f"step_2 cannot be read: .*{os.strerror(number)}") as error:
            Run().manager(tmp_path)
        assert not isinstance(error.value, dflow.DamagedCheckpoint)
    again = Run()
    with again.manager(tmp_path) as manager:
        assert (manager.resumed, again.last) == (2, 2)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        for step in (1, 2, 3):
            saved(manager, run, step)
    damage(tmp_path / "step_3")
    (tmp_path / "step_2" / "dflow.json").write_text("{")
    again = Run()
    with again.manager(tmp_path, keep=1) as manager:
        assert (manager.resumed, again.last) == (1, 1)
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == 2
        assert texts[0].startswith("step_3 is damaged, and step_1 is restored: array 'seen' (f32[4]) in ")
        assert texts[0].endswith(f"it stays as {tmp_path / 'step_3.damaged'}")
        saved(manager, again, 3)
    assert sorted(os.listdir(tmp_path)) == ["runs.json", "step_2.damaged", "step_3", "step_3.damaged"]
    damage(tmp_path / "step_3")
    with pytest.raises(dflow.DamagedCheckpoint, match=r"expected a checkpoint that can be read, got: array 'seen'"):
        Run().manager(tmp_path)
    assert (tmp_path / "step_3").exists()


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        saved(manager, run, 1)
    before = sorted(os.listdir(tmp_path))
    other = dflow.Variable(jnp.zeros(3), name="other")
    for _ in range(2):
        says = r"(?s)differ, and nothing is restored\n  at .*test_checkpoint_manager.*missing.*other.*unexpected.*seen"
        with pytest.raises(dflow.CheckpointError, match=says):
            dflow.CheckpointManager(tmp_path, [other])
        assert (other.read().tolist(), sorted(os.listdir(tmp_path))) == ([0.0] * 3, before)


def test_two_managers_of_one_folder_are_refused(tmp_path: Path) -> None:
    manager = Run().manager(tmp_path)
    says = rf"expected no other CheckpointManager that runs, got one in process {os.getpid()} on .*\n  at .*\n  close"
    with pytest.raises(dflow.CheckpointError, match=says):
        Run().manager(tmp_path)
    manager.close()
    Run().manager(tmp_path).close()


@pytest.mark.once
@pytest.mark.parametrize("ends_well", [True, False])
def test_a_manager_in_another_process_is_refused_until_that_process_ends(tmp_path: Path, ends_well: bool) -> None:
    script = """
import sys, jax.numpy as jnp, dflow
manager = dflow.CheckpointManager(sys.argv[1], [dflow.Variable(jnp.ones(4), name="seen")])
manager.save(3)
print("saving", flush=True)
assert sys.stdin.readline(), "an error ends the program"
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        with pytest.raises(dflow.CheckpointError, match=rf"got one in process {process.pid} on "):
            Run().manager(tmp_path)
        process.communicate("end" if ends_well else "", timeout=DEADLINE_S)
    run = Run()
    with run.manager(tmp_path) as manager:  # it was never closed; the interpreter waited for its save
        assert (manager.resumed, run.last) == (3, 1)
        assert manager._record.failures == (0 if ends_well else 1)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="this system has no /proc")
@pytest.mark.parametrize("path", ["/proc/run", "/dev/null/run"])
def test_a_folder_that_cannot_be_made_is_named(path: str) -> None:
    with pytest.raises(dflow.CheckpointError, match=rf"^{path}: expected a folder that can be written, got: "):
        Run().manager(Path(path))


def test_checkpoints_of_dflow_save_are_restored_and_never_deleted(tmp_path: Path) -> None:
    run = Run()
    for step in (6, 7):
        run.set(step)
        dflow.save(tmp_path / f"step_{step}", {"seen": run.seen})
    again = Run()
    with again.manager(tmp_path, keep=1, best=("loss", 1, "min")) as manager:
        assert (manager.resumed, again.last, steps_in(manager), manager.best) == (7, 7, [6, 7], None)
        for step in (8, 9):
            saved(manager, again, step)
        assert steps_in(manager) == [6, 7, 9]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every: expected a number of steps, a timedelta or 'auto', got 0"),
        ({"every": 0.5}, "every: expected"),
        ({"every": True}, "every: expected"),
        ({"every": timedelta()}, "every: expected"),
        ({"keep": 0}, "keep: expected a number of checkpoints, at least 1, got 0"),
        ({"best": "loss"}, r"best: expected \(metric, count, 'min' or 'max'\), got 'loss'"),
        ({"best": ("loss", 0, "min")}, "best: expected"),
        ({"best": ("loss", 1, "least")}, "best: expected"),
        ({"keep_one_per": 6}, "keep_one_per: expected a timedelta above 0, got 6"),
        ({"mtbf": None}, "mtbf: expected a timedelta above 0, got None"),
        ({"mtbf": timedelta(-1)}, "mtbf: expected"),
    ],
    ids=lambda given: str(given)[:30],
)
def test_wrong_options_are_refused(tmp_path: Path, options: Any, says: str) -> None:
    with pytest.raises(dflow.CheckpointError, match=rf"^{says}.*\n  at .*managed_run.py:\d+\n  give it like|give keep"):
        Run().manager(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_wrong_steps_and_metrics_are_refused(tmp_path: Path) -> None:
    with Run().manager(tmp_path, best=("loss", 1, "min")) as manager:
        with pytest.raises(dflow.CheckpointError, match=r"step: expected a number after -1, .*, got -1"):
            manager.save(-1)
        manager.save(3, {"loss": jnp.float32(1.0)})
        for step in (3, 2):
            with pytest.raises(dflow.CheckpointError, match=rf"step: expected a number after 3, .*, got {step}\n"):
                manager.save(step)
        with pytest.raises(dflow.CheckpointError, match=r"metrics: expected 'loss', the metric .*, got \['los'\]"):
            manager.save(4, {"los": 1.0})
        with pytest.raises(dflow.CheckpointError, match=r"metrics\['loss'\]: expected a number, got 'low'"):
            manager.save(4, {"loss": "low"})
        assert steps_in(manager) == [3]
    with pytest.raises(dflow.CheckpointError, match="expected an open CheckpointManager, got a closed one"):
        manager.step(5)
    manager.close()


def test_what_is_no_variable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dflow.CheckpointError, match="CheckpointManager was given no variables"):
        dflow.CheckpointManager(tmp_path, {})
    with pytest.raises(dflow.CheckpointError, match=r"give the path first.*dflow\.CheckpointManager\(path, variables"):
        dflow.CheckpointManager([dflow.Variable(0.0, name="v")], tmp_path)  # type: ignore[arg-type]
