"""The same manager on a cluster: worker 0 restores and saves, the others wait for it and take part."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import memory_cluster
from dflow.training import resuming, save_roles
from dflow.training.restoring import restore_named
from dflow.training.save_roles import OnTasks
from tests.dflow.training.managed_run import DEADLINE_S, held_saves, steps_in

# Two workers of one process make variables of one name, at different lines in one test.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")


class Worker:
    """A worker's view of two variables on different tasks, and the step that counts them up together."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        with cluster.parameter_servers():
            pair = [dflow.Variable(lambda: jnp.zeros(100), name=name) for name in ("one", "two")]
        self.pair = pair

        @dflow.jit
        def step() -> None:
            for variable in pair:
                variable.assign_add(jnp.ones(100))

        self.step = step

    def manager(self, folder: Path, **options: Any) -> dflow.CheckpointManager:
        return dflow.CheckpointManager(folder, self.pair, **options)

    @property
    def value(self) -> float:
        (value,) = {*np.unique(self.pair[0].read()), *np.unique(self.pair[1].read())}
        return float(value)


@contextmanager
def two_workers() -> Iterator[list[Worker]]:
    with memory_cluster(ps=2, workers=2) as memory:
        with ThreadPoolExecutor(2) as pool:
            joined = list(pool.map(memory.worker, range(2)))
        try:
            yield [Worker(cluster) for cluster in joined]
        finally:
            for cluster in joined:
                cluster.close()


def test_worker_0_saves_and_a_new_cluster_resumes(tmp_path: Path) -> None:
    with two_workers() as (first, second):
        with first.manager(tmp_path, every=1) as manager, second.manager(tmp_path, every=1) as other:
            for number in range(3):
                first.step()
                assert manager.step(number)
                assert not other.step(number)
                manager.wait()
            other.save(9)
            other.wait()
        assert first.pair[0].device != first.pair[1].device
    with two_workers() as (first, second), first.manager(tmp_path) as manager, second.manager(tmp_path) as other:
        assert (manager.resumed, other.resumed, other.next_step) == (2, 2, 3)
        assert (first.value, second.value) == (3.0, 3.0)
        assert steps_in(other) == [0, 1, 2]


def test_the_others_wait_until_the_state_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_workers() as (first, _), first.manager(tmp_path) as manager:
        for _ in range(5):
            first.step()
        manager.save(4)
    with two_workers() as (first, second), ThreadPoolExecutor(1) as pool:

        def joins() -> tuple[int, float]:
            with second.manager(tmp_path) as manager:
                return manager.next_step, second.value

        def restores(*args: Any, **options: Any) -> Any:
            assert OnTasks(second.pair[0], tmp_path, is_saver=False).next_step() is None
            report = restore_named(*args, **options)
            assert OnTasks(second.pair[0], tmp_path, is_saver=False).next_step() is None
            return report

        monkeypatch.setattr(resuming, "restore_named", restores)
        joining = pool.submit(joins)
        with first.manager(tmp_path):
            assert joining.result(DEADLINE_S) == (5, 5.0)


def test_a_worker_that_is_started_again_takes_part_in_the_state_as_it_is(tmp_path: Path) -> None:
    with two_workers() as (first, second):
        with first.manager(tmp_path) as manager:
            first.step()
            manager.save(0)
        second.step()
        for worker in (first, second):
            with worker.manager(tmp_path) as manager:
                assert (manager.next_step, worker.value) == (1, 2.0)


def test_variables_of_the_process_come_from_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with memory_cluster(ps=1) as memory:
        worker = Worker(memory.worker())

        def manager(name: str) -> tuple[dflow.CheckpointManager, dflow.Variable]:
            own = dflow.Variable(0.0, name=name)
            pair = worker.pair
            return dflow.CheckpointManager(tmp_path, [*pair, own], names=lambda one: "own" if one == name else one), own

        opened, own = manager("a")
        with opened:
            worker.step()
            own.assign(5.0)
            opened.save(0)
        worker.step()
        opened, own = manager("b")
        with opened:
            assert (worker.value, float(own.read())) == (2.0, 5.0)
        (tmp_path / "step_0").rename(tmp_path / "elsewhere")
        opened, own = manager("c")
        with opened:
            assert float(own.read()) == 0.0
        assert "have their initial values, since no checkpoint is before step 1: own" in caplog.text
        worker.cluster.close()


def test_a_lost_task_is_an_error_of_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_cluster(ps=1, workers=1) as memory:
        worker = Worker(memory.worker())
        manager = worker.manager(tmp_path)
        with held_saves(monkeypatch):
            manager.save(0)
            memory.tasks["ps:0"].close()
        with pytest.raises(dflow.CheckpointError, match=r"step_0: expected to be saved, got: .*ps"):
            manager.close()
        assert steps_in(manager) == []
        worker.cluster.close()


def test_a_worker_names_worker_0_when_it_waits_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

        def sleep(self, seconds: float) -> None:
            self.now_s += 10 * seconds

    monkeypatch.setattr(save_roles, "time", Clock())
    with two_workers() as (_, second):
        says = r"expected worker 0 to restore the state within 3 s, and it has not\n  at .*\n  make the same"
        with pytest.raises(dflow.DeadlineExceeded, match=says):
            second.manager(tmp_path, timeout_s=3.0)
