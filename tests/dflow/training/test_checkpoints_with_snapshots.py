"""Snapshots of the tasks beside checkpoints of the program: after a loss, the newest of each are of different steps.

A run of a strategy goes on from the snapshot, which has its count of steps; checkpoints of later steps are set aside. A
loop without a strategy goes on from the checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async, Sync
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.training import step_report
from tests.distributed.cluster.tasks_with_snapshots import Tasks

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
]
STEPS, EVERY = 17, 4


class Killed(Exception):
    """The end of a program, before a step."""


class Program:
    """Counts its steps in a variable of a task, and saves a checkpoint after every fourth one."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        with cluster.parameter_servers():
            self.count = dflow.Variable(0, name="count")
            self.used = dflow.Variable(lambda: jnp.zeros(STEPS, jnp.int32), name="used")
            weight = dflow.Variable(0.0, name="weight")
            optimizer = dflow.Optimizer(optax.sgd(1.0), [weight], name="sgd")
        self.manager = dflow.CheckpointManager(folder, [self.count, self.used, weight], every=EVERY)

        @dflow.jit
        def step(number: Any) -> Any:
            self.used.scatter_add(number[None], jnp.ones(1, jnp.int32))
            optimizer.apply([jnp.float32(1)])
            return self.count.assign_add(1)

        self.step = step

    def ask_for_a_snapshot(self) -> None:
        """Make a variable, which the next snapshot has immediately."""
        with self.cluster.parameter_servers():
            dflow.Variable(0, name="of a snapshot").read()

    def run(self, loop: str, before: Callable[[int], None] = lambda number: None) -> None:
        """Do the steps up to `STEPS`, by a trainer, by a strategy's own loop, or in a loop without a strategy."""

        def batch(number: int) -> Any:
            before(number)
            return np.int32(number)

        strategy = Sync(self.cluster) if loop.endswith("Sync") else Async(self.cluster)
        with self.manager as manager:
            if loop == "plain":
                for number in range(manager.next_step, STEPS):
                    self.step(batch(number))
                    manager.step(number)
                    manager.wait()
            elif loop.startswith("run"):
                run = strategy.run(self.step, batch, steps=STEPS, name="run")
                for number, _ in enumerate(run, manager.next_step):
                    manager.step(number)
                    manager.wait()
            else:
                dflow.Trainer(self.step, strategy, checkpoints=manager).run(batch, steps=STEPS, name="run")


def killed(tasks: Tasks, loop: str, folder: Path, snapshot: int, end: int) -> dict[str, bytes]:
    """Run a program with a snapshot before one step, whose processes end before another; return the records then."""
    rows: dict[str, bytes] = {}

    program = Program(tasks.worker, folder)

    def before(number: int) -> None:
        if number == snapshot:
            tasks.await_new_snapshot(program.ask_for_a_snapshot)
        if number == end:
            program.manager.wait()
            rows.update(tasks.ended_here())
            tasks.worker.coordinator.close("killed")
            raise Killed

    with suppress(Killed, dflow.DflowError):
        program.run(loop, before)
    assert rows, "the program has failed before"
    return rows


def test_a_worker_that_is_started_again_after_a_return_goes_on_by_itself(tmp_path: Path) -> None:
    with closing(Tasks(tmp_path / "snapshots", every_s=1000)) as tasks:
        killed(tasks, "Async", tmp_path / "run", 6, 14)
        tasks.start_again(1)
        tasks.worker = tasks.workers[0] = tasks.join(0)
        program = Program(tasks.worker, tmp_path / "run")
        assert (program.manager.next_step, steps_in(tmp_path / "run")) == (4, ["11.undone", "3", "7.undone"])
        program.run("Async")
        np.testing.assert_array_equal(program.used.read(), np.ones(STEPS))


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("step_") for path in folder.glob("step_*"))


#: The loop; the steps before which the newest snapshot is made and all processes end; then the first step of the
#: manager, the number of steps in the state, and the checkpoints.
ENDS = {
    "a trainer's newer checkpoint": ("Async", 6, 14, 4, 6, ["11.undone", "3", "7.undone"]),
    "that of synchronous training": ("Sync", 6, 14, 4, 6, ["11.undone", "3", "7.undone"]),
    "a snapshot from before a trainer's first checkpoint": ("Async", 2, 14, 12, 12, ["11", "3", "7"]),
    "one from before that of synchronous training": ("Sync", 2, 14, 12, 12, ["11", "3", "7"]),
    "one of rounds that are not reported": ("run of Sync", 2, 14, 1, 2, ["12.undone", "4.undone", "8.undone"]),
    "a loop's older checkpoint": ("run", 11, 12, 9, 11, ["0", "4", "8"]),
    "a newer one without a strategy": ("plain", 6, 14, 13, 13, ["12", "4", "8"]),
    "an older one without a strategy": ("plain", 10, 11, 9, 9, ["0", "4", "8"]),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_job_that_ended_goes_on_by_itself(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_report, "REPORT_S", math.inf)  # rounds are reported at the end of their run alone
    loop, snapshot, end, first, done, checkpoints = ENDS[case]
    with closing(Tasks(tmp_path / "snapshots", every_s=1000)) as tasks:
        rows = killed(tasks, loop, tmp_path / "run", snapshot, end)
    caplog.set_level(logging.WARNING)
    with closing(Tasks(tmp_path / "snapshots", every_s=1000, rows=rows)) as tasks:
        program = Program(tasks.worker, tmp_path / "run")
        assert (program.manager.next_step, int(program.count.read())) == (first, done)
        assert steps_in(tmp_path / "run") == checkpoints
        line = f"goes on from it; manager.next_step is {first}, since step {first - 1} is the last one saved before it"
        assert (line in caplog.text) == any("undone" in name for name in checkpoints), caplog.text
        program.run(loop)
        np.testing.assert_array_equal(program.used.read(), np.ones(STEPS))
        assert STEPS - 1 in [checkpoint.step for checkpoint in program.manager.checkpoints] or loop.startswith("run")
