"""What all strategies share: arguments, names and ends of runs; steps that were loaded."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.training.open_runs import OpenRun, OpenRuns
from dflow.distributed.training.strategy import Strategy, run_name
from dflow.distributed.wire.messages.status import GetStatus
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import StrategyError, VariableError
from dflow.tracing.source import is_user_frame
from tests.distributed.training.sync_programs import together
from tests.distributed.waiting import DEADLINE_S, until

STRATEGIES = dflow.distributed.Async, dflow.distributed.Sync, dflow.distributed.AllReduce


class Counting(Strategy):
    """Yields each result with the number of its step, and keeps the names of its runs."""

    run_prefix = "counting"

    def __init__(self) -> None:
        super().__init__(dflow.connect())
        self.runs: list[str] = []

    def results(self, run: dflow.distributed.StrategyRun) -> Iterator[Any]:
        self.runs.append(run.name)
        for number, outcome in enumerate(run.calls(range(run.steps))):
            yield outcome, number


def test_a_strategy_is_one_class_with_the_arguments_of_all() -> None:
    strategy = Counting()
    assert list(strategy.run(lambda a, b: a + b, [(1, 2), (3, 4), (5, 6)], steps=2)) == [(3, 0), (7, 1)]
    assert list(strategy.run(lambda a: a, [[1]], steps=1, name="mine")) == [([1], 0)]


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_the_variables_of_a_strategy_are_on_the_tasks_of_its_job(strategy: type[Strategy]) -> None:
    with memory_cluster() as memory, closing(memory.worker()) as cluster:
        made = []
        for job in ("ps", "worker"):
            with strategy(cluster, job=job).variables():  # type: ignore[call-arg]
                made.append(dflow.Variable(jnp.zeros(()), name=job))
        assert [variable.device for variable in made] == ["/job:ps/task:0", "/job:worker/task:0"]


def test_runs_without_a_name_are_numbered_for_each_strategy() -> None:
    class Again(Counting):
        run_prefix = "again"

    one, other = Counting(), Again()
    for strategy in (one, one, other):
        list(strategy.run(lambda a: a, [1], steps=1))
    first, second = (int(run.removeprefix("counting_")) for run in one.runs)
    assert second == first + 1
    assert other.runs == ["again_0"]


def test_workers_that_are_threads_number_their_runs_alike(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> int:
        with cluster.parameter_servers():
            w = dflow.Variable(lambda: jnp.zeros(2), name="w")
            optimizer = dflow.Optimizer(optax.sgd(1.0), [w], name="opt")
        step = dflow.jit(lambda x: optimizer.apply([x]))
        for _ in range(2):
            list(dflow.distributed.Async(cluster).run(step, lambda _: -jnp.ones(2), steps=6))
            dflow.Trainer(step, dflow.distributed.Sync(cluster)).run(lambda _: -jnp.ones(2), steps=6)
        cluster.barrier("done")
        return int(w.read()[0])

    assert together(workers, work) == [24, 24, 24]


def test_a_worker_that_joins_again_goes_on_with_its_numbers(memory: MemoryCluster) -> None:
    for first in (0, 2):
        with closing(memory.worker(0)) as cluster:
            assert [run_name(cluster, "run"), run_name(cluster, "run")] == [f"run_{first}", f"run_{first + 1}"]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_run_that_is_taken_by_next_has_all_its_steps(kind: Any) -> None:
    cluster = dflow.connect()
    run = kind(cluster).run(lambda a: a, [1, 2, 3], steps=3, name="taken")
    assert [next(run), next(run), next(run)] == [1, 2, 3]
    assert steps_of(cluster) == (3, 3)
    run = kind(cluster).run(lambda a: a, [1, 2, 3], steps=3, name="left")
    for result in run:
        if result == 3:
            break
    assert steps_of(cluster) == (6, 6)


def steps_of(cluster: Cluster) -> tuple[int, int]:
    status = cluster.coordinator.ask(GetStatus())
    return status.steps_done, status.steps_total


def test_a_run_that_was_left_is_closed_at_the_end_of_the_process() -> None:
    cluster = dflow.connect()
    run = dflow.distributed.Async(cluster).run(lambda a: a, range(30), steps=30)
    assert next(run) == 0
    done, total = steps_of(cluster)
    cluster.part(OpenRuns).close()
    assert steps_of(cluster) == (done + 1, total)
    with pytest.raises(StrategyError, match="expected an open cluster until its last step"):
        next(run)


class Each(Strategy):
    """Each worker does all steps."""

    def results(self, run: dflow.distributed.StrategyRun) -> Iterator[Any]:
        return run.calls(range(run.steps))


@pytest.mark.parametrize("kind", [*STRATEGIES, Each])
@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_a_loop_that_closes_its_cluster_before_its_last_step_ends_with_an_error(kind: Any, last: int) -> None:
    cluster = dflow.connect()
    run, found = kind(cluster).run(lambda a: a, [1, 2, 3], steps=3, name="closed"), []

    def loop() -> None:
        if last == 0:
            cluster.close()
        for result in run:
            found.append(result)
            if result == last:
                cluster.close()

    if last == 3:
        loop()
    else:
        text = r"run 'closed': expected an open cluster until its last step, got cluster.close\(\) in the loop"
        with pytest.raises(
            StrategyError, match=text + r"(.|\n)*test_strategy.py(.|\n)*close the cluster after the loop"
        ):
            loop()
    assert found == [1, 2, 3][:last]


@pytest.mark.parametrize("kind", [dflow.distributed.Async, dflow.distributed.Sync])
def test_a_worker_that_closes_its_cluster_in_its_loop_leaves_the_steps_to_the_others(
    workers: list[Cluster], kind: Any
) -> None:
    found: list[int] = []
    begun = threading.Event()

    def work(index: int, cluster: Cluster) -> None:
        with cluster.parameter_servers():
            optimizer = dflow.Optimizer(optax.sgd(1.0), [dflow.Variable(0.0, name="w")], name="sgd")
        step = dflow.jit(lambda x: optimizer.apply([x]))
        run = kind(cluster).run(step, lambda number: jnp.float32(1), steps=12, name="left")
        if index:
            assert begun.wait(DEADLINE_S)
            found.extend(1 for _ in run)
            return
        with pytest.raises(StrategyError, match="an open cluster until"):  # noqa: PT012
            for _ in run:
                begun.set()
                cluster.close()

    together(workers, work)
    assert found


def opened(results: Generator[int], cluster: Cluster) -> Generator[int]:
    run = OpenRun()
    return cluster.part(OpenRuns).add(run.of("run", results), run)


def test_a_run_whose_end_fails_keeps_no_other_from_its_end(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[str] = []

    def run(name: str, error: Exception) -> Generator[int]:
        try:
            yield 1
        finally:
            ends.append(name)
            raise error

    cluster = dflow.connect()
    runs = [
        opened(run("a", OSError("a pipe is broken")), cluster),
        opened(run("b", ValueError("signal only works in main thread")), cluster),
    ]
    assert [*map(next, runs)] == [1, 1]
    cluster.close()
    assert sorted(ends) == ["a", "b"]
    assert "a pipe is broken" in caplog.text
    assert "signal only works" in caplog.text


@pytest.mark.parametrize("is_at_end", [False, True])
def test_a_run_that_a_thread_runs_ends_after_its_step(caplog: pytest.LogCaptureFixture, is_at_end: bool) -> None:
    cluster, opened, ends = dflow.connect(), OpenRun(), list[str]()

    def run() -> Generator[int]:
        try:
            cluster.part(OpenRuns).close()
            opened.is_at_end = is_at_end
            yield 1
            yield 2
        finally:
            ends.append("closed")

    results = cluster.part(OpenRuns).add(opened.of("run", run()), opened)
    assert next(results) == 1
    with pytest.raises(StopIteration if is_at_end else StrategyError, match=None if is_at_end else "an open cluster"):
        next(results)
    assert ends == ["closed"]
    assert not caplog.records


def test_a_cluster_is_left_though_the_end_of_a_run_is_interrupted() -> None:
    with memory_cluster(ps=1, workers=2) as memory:
        first, second = memory.worker(0), memory.worker(1)

        def run() -> Generator[int]:
            try:
                yield 1
            finally:
                raise KeyboardInterrupt

        one = opened(run(), first)
        next(one)
        with pytest.raises(KeyboardInterrupt):
            first.close()
        until(lambda: first.task not in second.tasks)
        second.close()


@pytest.mark.once
def test_a_program_that_keeps_its_run_ends_without_a_word() -> None:
    code = """
import dflow
run = dflow.distributed.Async(dflow.connect()).run(lambda a: a, [1, 2, 3], steps=3)
for number in run:
    if number == 3:
        break
print(number)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.parametrize(
    ("kind", "batches", "steps", "fact"),
    [
        (Strategy, [1], 1, "Strategy: expected a method results, got none"),
        (Each, 5, 1, r"batches: expected an iterable or a function of .*, got 5"),
        (Each, [1], "two", "run: expected an integer for steps, got 'two'"),
        *((kind, [1], -1, "steps=-1 of a run is negative") for kind in (Each, *STRATEGIES)),
    ],
)
def test_wrong_arguments_are_refused_at_the_users_line(kind: Any, batches: Any, steps: Any, fact: str) -> None:
    with pytest.raises(StrategyError, match=rf"{fact}(.|\n)*test_strategy.py"):
        list(kind(dflow.connect()).run(lambda a: a, batches, steps=steps))


# Loaded training steps under strategies: `Async` runs them over variables on tasks, other strategies refuse them.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    w = dflow.Variable(lambda: jnp.ones(4), name="w")
    optimizer = dflow.Optimizer(optax.sgd(0.5), [w], name="opt")

    @dflow.jit
    def step(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: jnp.sum(x * w), [w])()
        optimizer.apply(gradients)
        return value

    return dflow.export(step, jax.ShapeDtypeStruct((4,), jnp.float32)).save(tmp_path / "step")


def run(kind: str, worker: Cluster, step: Any) -> list[float]:
    strategy = getattr(dflow.distributed, kind)(worker)
    return [float(one) for one in strategy.run(step, [np.ones(4, np.float32)] * 2, steps=2, name=f"{kind} loaded")]


def test_steps_of_variables_of_this_process_are_refused(worker: Cluster, path: Path) -> None:
    loaded = dflow.load(path)
    loaded(np.ones(4, np.float32))  # outside of a strategy they may be trained, and are traced
    fact = r"'w', which the loaded function 'step' trains, lives in this process(.|\n)*load it within cluster.param"
    with pytest.raises(VariableError, match=fact):
        run("Async", worker, loaded)


def test_steps_of_variables_of_tasks_are_for_async(worker: Cluster, path: Path) -> None:
    with worker.parameter_servers():
        loaded = dflow.load(path)
    for step, fact in (
        (loaded, r"got a Loaded(.|\n)*train by Async"),
        (dflow.jit(lambda x: loaded(x) + 0), r"gives gradients 0 times \(to none\)(.|\n)*train by Async"),
    ):
        with pytest.raises(StrategyError, match=fact):
            run("Sync", worker, step)
    assert run("Async", worker, loaded) == [4, 2]


@pytest.mark.parametrize(("by_number", "says"), [(True, "run 'bad': batch 2"), (False, "batch 2 of this worker's")])
def test_bad_data_is_told_with_the_number_of_its_batch_and_few_frames(by_number: bool, says: str) -> None:
    w = dflow.Variable(jnp.zeros(3), name="w")
    step = dflow.jit(lambda x: w @ x)
    given: list[Any] = [np.ones(3), np.ones(3), np.ones(2), np.ones(3)]
    strategy = dflow.distributed.Async(dflow.connect())
    with pytest.raises(TypeError) as raised:
        list(strategy.run(step, given.__getitem__ if by_number else given, steps=4, name="bad"))
    assert any(says in note for note in raised.value.__notes__)
    own = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__) if not is_user_frame(frame)]
    assert len(own) <= 1
