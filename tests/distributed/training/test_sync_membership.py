"""Synchronous training while workers die, join, leave the loop or run out of batches, and with backup workers."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jax
import pytest

from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.training import long_wait, step_report
from dflow.distributed.wire.messages.status import GetStatus
from dflow.testing import MemoryCluster
from dflow.tracing.errors import DeadlineExceeded, RemoteError, StrategyError, TaskLost
from tests.distributed.training.sync_programs import Sync, Turns, pair, together

#: All tests make their steps by one function.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")]


def test_a_worker_that_runs_out_of_data_leaves_the_others_their_rounds(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        return len(list(Sync(cluster).run(step, [1.0] * [7, 0, 2][index], steps=7, name="run")))

    assert together(workers, work) == [7, 0, 2]


def test_a_worker_that_runs_out_of_data_leaves_also_within_the_handler_of_an_error(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        try:
            raise ValueError
        except ValueError:
            return len(list(Sync(cluster, elastic=False).run(step, [1.0] * [3, 1, 3][index], steps=3, name="run")))

    assert together(workers, work) == [3, 1, 3]


def test_a_run_that_is_named_again_is_over_and_reported_as_done(
    workers: list[Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [pair(cluster)[1] for cluster in workers]

    def work(index: int, cluster: Cluster, count: int = 3) -> int:
        return len(list(Sync(cluster).run(steps[index], itertools.repeat(1.0), steps=count, name="run")))

    with monkeypatch.context() as lost:
        lost.setattr(step_report.StepProgress, "_tell", lambda *_: None)  # with their connections
        assert together(workers, work) == [3] * 3
    assert work(0, workers[0]) == 0
    status = workers[0].coordinator.ask(GetStatus())
    assert (status.steps_done, status.steps_total) == (3, 3)
    with pytest.raises(RemoteError, match="run 'run' has 3 rounds and was asked for with 4"):
        work(0, workers[0], 4)


def test_a_worker_that_waits_says_whom_for_long_before_its_time_is_over(
    memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(long_wait, "NOTICE_AFTER_S", 0.05)
    settings = ClusterSettings(join_timeout_s=10.0, request_timeout_s=30.0, step_timeout_s=0.5)
    with closing(memory.worker(0, settings)) as cluster:
        _, step = pair(cluster)
        fact = r"round 0 of 'run' has not ended: 3 gradients .*task:0 gave one and .*task:1, (.|\n)*not joined yet: "
        with pytest.raises(DeadlineExceeded, match=fact + "worker:1, worker:2\n  start what is missing"):
            list(Sync(cluster).run(step, itertools.repeat(1.0), steps=3, name="run"))
    said = [record.getMessage() for record in caplog.records if "waits, for" in record.getMessage()]
    assert said
    assert all("worker/task:0 gave one" in text and "not joined yet: worker:1, worker:2" in text for text in said)


def test_a_lost_parameter_task_ends_the_run_of_every_worker(memory: MemoryCluster, workers: list[Cluster]) -> None:
    def batches(index: int) -> Iterator[float]:
        yield from itertools.repeat(1.0, 3)
        if index == 0:
            memory.tasks["ps:1"].close()
        yield from itertools.repeat(1.0)

    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        run = Sync(cluster).run(step, batches(index), steps=1000, name="run")
        with pytest.raises((TaskLost, RemoteError)):
            list(run)

    together(workers, work)


def test_a_second_run_traces_nothing_again_and_leaves_nothing_but_its_number_on_any_task(
    memory: MemoryCluster, workers: list[Cluster]
) -> None:
    steps = [pair(cluster)[1] for cluster in workers]

    def do(name: str) -> None:
        together(
            workers, lambda index, one: list(Sync(one).run(steps[index], itertools.repeat(1.0), steps=3, name=name))
        )

    def held() -> Any:
        gc.collect()
        servers = [task.server for task in memory.tasks.values()] + [cluster.server for cluster in workers]
        return (
            [(server.statistics().plans, [depth.name for depth in server.state().depths]) for server in servers],
            [len(step.trace_log()) for step in steps],
            [info.name for info in memory.coordinator.status().variables],
            len(jax.live_arrays()),
        )

    do("early")  # later runs have the host of the first, so their step is not traced again
    before = held()
    assert [depths for _, depths in before[0]] == [[]] * 5
    for number in range(3):
        do(f"late {number}")
    assert held() == before


# Synchronous training with backup workers: late gradients are dropped and counted, or their batches used again.


class Diverging:
    """A step whose loss is NaN in its third call."""

    __name__ = "diverging"

    def __init__(self, step: Any) -> None:
        self.step, self.calls = step, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return {**self.step(x), "loss": math.nan if self.calls == 3 else 0.5}


def test_a_loss_that_is_not_finite_and_a_run_short_of_its_rounds_stand_in_the_status(
    memory: MemoryCluster, workers: list[Cluster]
) -> None:
    def work(index: int, cluster: Cluster) -> None:
        _, step = pair(cluster)
        list(Sync(cluster).run(Diverging(step) if index == 1 else step, [1.0] * 5, steps=9, name="run"))
        cluster.report(f"{index} is done", 1.0)  # after the worker's last report of its rounds

    together(workers, work)
    status = memory.coordinator.status()
    [found] = status.not_finite
    assert (found.run, found.task, found.metric, found.step) == ("run", workers[1].task, "loss", 2)
    assert (status.steps_done, status.steps_total) == (5, 9)


def test_a_round_is_reported_as_done_when_its_update_is_made(
    memory: MemoryCluster, workers: list[Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_report, "REPORT_S", -1.0)
    turns = Turns()

    def work(index: int, cluster: Cluster) -> int | None:
        _, step = pair(cluster)
        if index:
            turns.wait("0 has given its gradient")
        done = None
        for _ in Sync(cluster).run(step, [1.0] * 2, steps=2, name="run"):
            if index == 0 and done is None:
                cluster.report("given", 1.0)  # after the worker's report of its step
                done = memory.coordinator.status().steps_done
                turns.done("0 has given its gradient")
        cluster.report(f"{index} is done", 1.0)
        return done

    assert together(workers, work)[0] == 0
    assert memory.coordinator.status().steps_done == 2


@pytest.mark.parametrize("requeue", [False, True])
def test_a_batch_whose_gradient_was_dropped_is_used_again_if_that_is_wanted(
    workers: list[Cluster], requeue: bool
) -> None:
    turns, used = Turns(), []

    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)

        def late(x: Any) -> Any:
            used.append(int(x))
            if len(used) == 1:
                turns.done("begun")
                turns.wait("0", "1")
            return step(x)

        def after_it_has_begun() -> Iterator[float]:
            turns.wait("begun")
            yield from itertools.repeat(0.0)

        late.trace = step.trace  # type: ignore[attr-defined]
        strategy = Sync(cluster, backup_workers=1, requeue=requeue)
        supply = itertools.count(1.0) if index == 2 else after_it_has_begun()
        for number, _ in enumerate(strategy.run(late if index == 2 else step, supply, steps=6, name="run")):
            if index < 2 and number == 0:
                turns.done(str(index))
            if index == 2 and number == 1:
                break
            if index < 2 and number == 2:
                turns.wait("second")
            if index == 2:
                turns.done("second")
        return strategy.dropped

    together(workers, work)
    assert used[:2] == ([1, 1] if requeue else [1, 2])


def test_a_function_of_batches_gives_each_round_its_own(workers: list[Cluster]) -> None:
    strategy = Sync(workers[0], backup_workers=1, requeue=True)
    with pytest.raises(StrategyError, match="requeue=True: expected an iterable of batches, got a function"):
        list(strategy.run(lambda x: x, float, steps=1))
