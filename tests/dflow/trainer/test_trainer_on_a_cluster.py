"""`dflow.Trainer` on a cluster: the same script on every worker; deaths, and a cluster that is started again."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async, Sync
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import MemoryCluster, memory_cluster
from dflow.training.save_roles import OnTasks
from tests.distributed.waiting import DEADLINE_S

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

WORKERS = 2
TARGETS = np.arange(200, dtype=np.float32)
HELD_OUT = dflow.data.batches(np.ones(10, np.float32), 3)


@contextmanager
def cluster_of_workers() -> Iterator[tuple[MemoryCluster, list[Cluster]]]:
    with memory_cluster(ps=2, workers=WORKERS) as memory:
        with ThreadPoolExecutor(WORKERS) as pool:
            joined = list(pool.map(memory.worker, range(WORKERS)))
        try:
            yield memory, joined
        finally:
            for one in joined:
                one.close()


class Program:
    """One weight, moved to the mean of the targets of each step, and the number of times that each batch was used."""

    def __init__(self, cluster: Cluster, strategy: Any, folder: Path | None = None, **options: Any) -> None:
        with cluster.parameter_servers():
            w = dflow.Variable(lambda: jnp.zeros(()), name="w")
            used = dflow.Variable(lambda: jnp.zeros(len(TARGETS), jnp.int32), name="used")
            optimizer = dflow.Optimizer(optax.sgd(0.1), [w], name="sgd")

        @dflow.jit
        def step(number: Any, target: Any) -> Any:
            used.scatter_add(number, 1)
            loss, gradients = dflow.value_and_grad(lambda: (w - target) ** 2, [w])()
            optimizer.apply(gradients)
            return loss

        @dflow.jit
        def seen(x: Any) -> Any:
            return {"w": w * x, "steps": jnp.sum(used.read()) * x}

        self.w, self.used, self.evaluations = w, used, list[int]()
        state = {"w": w, "used": used}
        self.manager = dflow.CheckpointManager(folder, state, every=4) if folder is not None else None
        self.trainer = dflow.Trainer(
            step,
            strategy(cluster),
            evaluation=(seen, HELD_OUT),
            evaluate_every=2,
            checkpoints=self.manager,
            **options,
        )

    def run(self, steps: int, before: Callable[[int], None] = lambda number: None) -> dflow.TrainingResult:
        def batch(number: int) -> Any:
            before(number)
            return np.int32(number), TARGETS[number]

        with self.manager or nullcontext():
            return self.trainer.run(batch, steps=steps, name="run")


def on_all(workers: list[Cluster], work: Callable[[int, Cluster], Any]) -> list[Any]:
    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(work, index, cluster) for index, cluster in enumerate(workers)]
        return [one.result(DEADLINE_S) for one in running]


@pytest.mark.parametrize("strategy", [Async, Sync])
def test_a_cluster_that_was_killed_goes_on_with_the_right_step_and_batch(strategy: Any, tmp_path: Path) -> None:
    each = 1 if strategy is Async else WORKERS

    def killed(index: int, cluster: Cluster) -> None:
        def before(number: int) -> None:
            if number >= 9 * each:
                raise ZeroDivisionError

        with suppress(ZeroDivisionError):
            Program(cluster, strategy, tmp_path).run(100, before)

    with cluster_of_workers() as (_, workers):
        on_all(workers, killed)
    with cluster_of_workers() as (_, workers):
        programs = [Future[Program]() for _ in workers]

        def resumed(index: int, cluster: Cluster) -> dflow.TrainingResult:
            program = Program(cluster, strategy, tmp_path)
            assert program.manager is not None
            assert program.manager.next_step in (4, 8)
            programs[index].set_result(program)
            return program.run(13)

        results = on_all(workers, resumed)
        program = programs[0].result()
        used = np.asarray(program.used.read())
        assert (used == (np.arange(len(TARGETS)) < 13 * each)).all()
        assert {result.steps for result in results} == {13}
        assert results[0].evaluation == results[1].evaluation
        assert results[0].evaluation["examples"] == 10
        assert results[0].evaluation["steps"] == 13 * each
        if strategy is Sync:
            w = np.float32(0)
            for targets in np.split(TARGETS[: 13 * each], 13):
                w -= np.float32(0.1) * np.mean(2 * (w - targets))
            assert np.allclose(program.w.read(), w, rtol=1e-5)


@pytest.mark.parametrize("victim", range(WORKERS))
def test_the_others_go_on_when_a_worker_dies(victim: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    has_died = threading.Event()

    def work(index: int, cluster: Cluster) -> Any:
        def before(number: int) -> None:
            if index == victim and number >= 6:
                cluster.coordinator.close("killed")
                has_died.set()
            elif number >= 6:
                assert has_died.wait(DEADLINE_S)

        program = Program(cluster, Async, tmp_path)
        try:
            return program.run(20, before), np.asarray(program.used.read())
        except dflow.DflowError:
            return None

    with cluster_of_workers() as (_, workers):
        results = on_all(workers, work)
    assert results[victim] is None
    result, used = results[1 - victim]
    assert (used == (np.arange(len(TARGETS)) < 20)).all()
    assert result.steps == result.evaluation["steps"] == 20
    assert ("no checkpoint after 20 steps: /job:worker/task:0 has left" in caplog.text) == (victim == 0)


def test_worker_0_saves_no_state_that_the_others_have_left_behind(tmp_path: Path) -> None:
    with cluster_of_workers() as (memory, workers), ThreadPoolExecutor(1) as pool:
        with Program(workers[0], Async, tmp_path).manager or nullcontext():
            workers[0].close()  # a normal end, before anything was elected
        is_back, returned = threading.Event(), list[Future[Any]]()

        def again() -> Any:
            workers[0] = memory.worker(0)
            return Program(workers[0], Async, tmp_path).run(9, lambda number: is_back.set())

        def before(number: int) -> None:
            if number == 6:  # worker 1 has passed the checkpoint after 4 steps
                returned.append(pool.submit(again))
                assert is_back.wait(DEADLINE_S)

        Program(workers[1], Async, tmp_path).run(9, before)
        returned[0].result(DEADLINE_S)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_7", "step_8"]


def test_a_worker_that_is_started_again_finds_what_is_done(tmp_path: Path) -> None:
    with cluster_of_workers() as (memory, workers):
        on_all(workers, lambda index, cluster: Program(cluster, Async, tmp_path).run(9))
        workers[1].close()
        workers[1] = memory.worker(1)
        again = Program(workers[1], Async)
        steps: list[int] = []
        result = again.run(9, steps.append)
        assert (steps, result.steps, result.evaluation["steps"]) == ([], 9, 9)
        assert again.used.read().sum() == 9


class Numbers(dflow.Callback):
    """Notes the numbers of the steps."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_step(self, steps: int, outcome: Any) -> None:
        self.numbers.append(steps)


def test_a_step_has_its_number_also_if_later_batches_are_taken_early() -> None:
    numbers = Numbers()
    trainer = dflow.Trainer(lambda number: number, Async(dflow.connect(), lookahead=True), callbacks=[numbers])
    assert trainer.run(float, steps=20).steps == 20
    assert numbers.numbers == list(range(1, 21))


def test_steps_undone_by_a_return_to_a_snapshot_are_done_again() -> None:
    runs: list[str] = []

    class Undoes(dflow.Callback):
        def __init__(self, cluster: Cluster) -> None:
            self.cluster, self.evaluations = cluster, list[int]()

        def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> None:
            self.evaluations.append(steps)
            if steps == 4:
                self.cluster.steps.undone += 1

    class Recorded(Async):
        def run(self, *args: Any, **options: Any) -> Iterator[Any]:
            runs.append(options["name"])
            return super().run(*args, **options)

    with cluster_of_workers() as (_, workers):
        undoes = Undoes(workers[0])
        Program(workers[0], Recorded, callbacks=[undoes]).run(6)
    assert undoes.evaluations == [2, 4, 6]
    assert runs == [f"run {part}" for part in ("0-2", "2-4", "0-2", "2-4", "4-6")]


def test_a_checkpoint_before_a_return_counts_when_its_steps_are_done_again(tmp_path: Path) -> None:
    class Undoes(dflow.Callback):
        """Returns to the beginning at 6 steps, after the checkpoint of 4, whose number the tasks then lack."""

        def __init__(self, cluster: Cluster) -> None:
            self.cluster, self.next_steps = cluster, list[int | None]()

        def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> None:
            progress = OnTasks(program.w, tmp_path, is_saver=True)
            if steps == 6:
                progress.set_next_step(0)
                self.cluster.steps.undone += 1
            self.next_steps.append(progress.next_step())

    with cluster_of_workers() as (_, workers):
        undoes = Undoes(workers[0])
        program = Program(workers[0], Async, tmp_path, callbacks=[undoes])
        program.run(7)
    assert undoes.next_steps == [0, 0, 0, 4]


class Together(Async):
    """A strategy whose workers have variables of their own."""

    ends_together = True


def test_checkpoints_by_time_are_refused_and_those_without_the_workers_own_variables(tmp_path: Path) -> None:
    with cluster_of_workers() as (_, workers):
        w = Program(workers[0], Async).w
        with dflow.CheckpointManager(tmp_path, {"w": w}) as manager:
            text = r"(?s)checkpoints: expected every= a number of steps on a cluster, got 'auto'.*every=1000"
            with pytest.raises(dflow.TrainingError, match=text):
                dflow.Trainer(lambda x: x, Async(workers[0]), checkpoints=manager)
        with dflow.CheckpointManager(tmp_path, {"w": w}, every=2) as manager:
            text = r"(?s)checkpoints: expected the variables of each worker for Together, got .* dense layers"
            with pytest.raises(dflow.TrainingError, match=text):
                dflow.Trainer(lambda x: x, Together(workers[0]), checkpoints=manager)


class Stops(dflow.Callback):
    """Ends the run from one of the methods, for a reason that only worker 1 has."""

    def __init__(self, cluster: Cluster, where: str) -> None:
        self.where, self.is_mine, self.ended = where, cluster.index == 1, list[str]()

    def _reason(self, where: str) -> str | None:
        return f"worker 1 has seen enough in {where}" if self.is_mine and where == self.where else None

    def on_step(self, steps: int, outcome: Any) -> str | None:
        """End the run between two steps."""
        return self._reason("on_step") if steps > 3 else None

    def on_metrics(self, steps: int, metrics: Mapping[str, float]) -> str | None:
        """End at the end of steps."""
        return self._reason("on_metrics") if steps > 3 else None

    def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> str | None:
        """End at an evaluation."""
        return self._reason("on_evaluation") if steps > 3 else None

    def on_end(self, steps: int, reason: str) -> None:
        """Record the reason."""
        self.ended.append(reason)


@pytest.mark.parametrize(("where", "strategy"), [("on_step", Async), ("on_metrics", Sync), ("on_evaluation", Sync)])
def test_all_workers_end_by_the_reason_of_one(strategy: Any, where: str, tmp_path: Path) -> None:
    def run(index: int, cluster: Cluster) -> tuple[str, list[str], int]:
        stops = Stops(cluster, where)
        program = Program(cluster, strategy, tmp_path, callbacks=[stops])
        result = program.run(90)
        return result.reason, stops.ended, result.steps

    with cluster_of_workers() as (_, workers):
        reasons = on_all(workers, run)
    expected = f"worker 1 has seen enough in {where}"
    assert [(reason, ended) for reason, ended, _ in reasons] == [(expected, [expected])] * WORKERS
    assert all(steps < 90 for *_, steps in reasons)


def test_workers_with_results_of_their_own_follow_those_of_one(tmp_path: Path) -> None:
    found: list[Mapping[str, float]] = []

    def run(index: int, cluster: Cluster) -> dflow.TrainingResult:
        with cluster.parameter_servers():
            w = dflow.Variable(lambda: jnp.zeros(()), name="w")
            optimizer = dflow.Optimizer(optax.sgd(0.1), [w], name="sgd")
        step = dflow.jit(lambda x: optimizer.apply([x]))
        # It reads no variable of a task, so that each worker evaluates for itself.
        own = dflow.Variable(np.float32(index), name=f"own {index}")
        numbers = itertools.count()
        seen = dflow.jit(lambda x: {"loss": x * 0 + own})

        class Better(dflow.Callback):
            """Makes the result of worker 1 better each time, and keeps that of worker 0."""

            def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> str | None:
                found.append(dict(metrics))
                own.assign(own - index * 10.0 - next(numbers))
                return None

        return dflow.Trainer(
            step,
            Async(cluster),
            evaluation=(seen, HELD_OUT),
            evaluate_every=2,
            callbacks=[Better(), dflow.EarlyStopping(patience=2)],
        ).run(np.float32, steps=40, name="own")

    with cluster_of_workers() as (_, workers):
        first, second = on_all(workers, run)
    assert (first.reason, first.evaluation) == (second.reason, second.evaluation)
    assert len(found) % WORKERS == 0
