"""Real disks that are full or read-only: a clear error, and the last good checkpoint and state stay.

A process mounts a small file system in its own namespace, so writes of TensorStore and SQLite fail too.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dflow
from tests.dflow.training.managed_run import DEADLINE_S, Run, saved, steps_in
from tests.disk_faults import FAULTS
from tests.effort import examples

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
#: Runs the command after it with a disk of 2 MiB at the path before it.
MOUNT = 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"'


@functools.cache
def may_mount(folder: Path) -> bool:
    try:
        return _mounted(folder, ["true"]).returncode == 0
    except FileNotFoundError:
        return False


def _mounted(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*NAMESPACE, "sh", "-c", MOUNT, str(folder), *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def on_small_disk(folder: Path, script: str) -> list[str]:
    """Run a script with its folder on a disk of 2 MiB; return the lines that it printed."""
    if not may_mount(folder):
        pytest.skip("this system lets no user mount a file system")
    ran = _mounted(folder, [sys.executable, "-c", script, str(folder)])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()


CHECKPOINTS = """
import os, subprocess, sys
import jax.numpy as jnp, dflow

folder, how = sys.argv[1], HOW
w = dflow.Variable(jnp.zeros(50_000), name="w")
manager = dflow.CheckpointManager(folder + "/run", [w], every=1, keep=5)
manager.save(0)
manager.wait()
dflow.save(folder + "/c.safetensors", w)
dflow.save(folder + "/c", w)

def refuse():
    if how == "full":
        with open(folder + "/filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
    else:
        manager.close()  # its lock is a file that is open for writing
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)

def allow():
    if how == "full":
        os.unlink(folder + "/filler")
    else:
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)

def says(call):
    try:
        call()
        print("no error")
    except dflow.CheckpointError as error:
        print(str(error).splitlines()[0])

refuse()
w.assign(jnp.ones(50_000))
says(lambda: dflow.save(folder + "/c.safetensors", w, overwrite=True))
says(lambda: dflow.save(folder + "/c", w, overwrite=True))
says(lambda: dflow.save(folder + "/d.orbax", w))
if how == "full":
    manager.save(1)
    says(manager.wait)
else:
    says(lambda: dflow.CheckpointManager(folder + "/run", [w]))
for path in ("/c.safetensors", "/c", "/run/step_0"):
    dflow.restore(folder + path, w)
    print(float(w.sum()))
allow()
w.assign(jnp.ones(50_000))
dflow.save(folder + "/c", w, overwrite=True)
if how != "full":
    manager = dflow.CheckpointManager(folder + "/run", [w], every=1, keep=5)
manager.save(1)
manager.close()
print(sorted(os.listdir(folder)), sorted(os.listdir(folder + "/run")))
"""


@pytest.mark.once
@pytest.mark.parametrize(
    ("how", "reason"), [("full", "No space left on device"), ("read-only", "Read-only file system")]
)
def test_a_disk_that_refuses_is_named_and_leaves_every_checkpoint(tmp_path: Path, how: str, reason: str) -> None:
    lines = on_small_disk(tmp_path, CHECKPOINTS.replace("HOW", repr(how)))
    errors, values, left = lines[:4], lines[4:7], lines[7]
    for path, text in zip(("c.safetensors", "c", "d.orbax", "run"), errors, strict=True):
        assert f"{tmp_path}/{path}" in text or f"into {tmp_path}" in text, text
        assert reason in text or "takes no new files" in text, text
    assert values == ["0.0"] * 3
    assert left == "['c', 'c.safetensors', 'run'] ['runs.json', 'step_0', 'step_1']"


STATE = """
import sys
from pathlib import Path
from dflow.distributed.coordinator.coordinator_store import SqliteStore
from dflow.distributed.coordinator.durable_records import Change

path = Path(sys.argv[1]) / "state"
store, written = SqliteStore(path), 0
try:
    while True:
        store.write([Change("a", bytes([written])), Change(str(written), bytes(30_000))])
        written += 1
except OSError as error:
    print(str(error).replace(sys.argv[1], "..."))
store.close()
again = SqliteStore(path)
rows = again.load()
print(rows["a"] == bytes([written - 1]), len(rows) == written + 1)
again.close()
"""


@pytest.mark.once
def test_a_coordinator_on_a_full_disk_has_all_that_it_wrote_before(tmp_path: Path) -> None:
    error, *rest = on_small_disk(tmp_path, STATE)
    assert error == "the coordinator's state could not be written to .../state: database or disk is full"
    assert rest == ["True True"]


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
