"""Synchronous training while workers die, join, leave the loop or run out of batches."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jax
import pytest

from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.training import long_wait
from dflow.testing import MemoryCluster
from dflow.tracing.errors import DeadlineExceeded, RemoteError, TaskLost
from tests.distributed.training.sync_programs import Sync, pair, together

#: All tests make their steps by one function.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")]


def test_a_worker_that_runs_out_of_data_leaves_the_others_their_rounds(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        return len(list(Sync(cluster).run(step, [1.0] * [7, 0, 2][index], steps=7, name="run")))

    assert together(workers, work) == [7, 0, 2]


def test_leaving_the_loop_and_an_error_of_the_step_free_the_others(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)

        def batches() -> Iterator[Any]:
            yield from [1.0, 1.0]
            if index == 1:
                raise ZeroDivisionError("in the batches")
            yield from itertools.repeat(1.0)

        done = 0
        try:
            for _ in Sync(cluster).run(step, batches(), steps=8, name="run"):
                done += 1
                if index == 2 and done == 4:
                    break
        except ZeroDivisionError:
            return -done
        return done

    assert together(workers, work) == [8, -2, 4]


def test_a_run_that_is_named_again_is_over(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        counts = [len(list(Sync(cluster).run(step, itertools.repeat(1.0), steps=3, name="run"))) for _ in range(2)]
        with pytest.raises(RemoteError, match="run 'run' has 3 rounds and was asked for with 4"):
            list(Sync(cluster).run(step, itertools.repeat(1.0), steps=4, name="run"))
        return counts

    assert together(workers, work) == [[3, 0]] * 3


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


def test_finished_runs_leave_nothing_but_their_numbers_on_any_task(
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

    for number in range(3):  # on each of the two hosts, and once more
        do(f"early {number}")
    before = held()
    assert [depths for _, depths in before[0]] == [[]] * 5
    for number in range(3):
        do(f"late {number}")
    assert held() == before
