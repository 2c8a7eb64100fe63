"""Synchronous training with backup workers: late gradients are dropped and counted, or their batches used again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.training import step_report
from dflow.testing import MemoryCluster
from dflow.tracing.errors import StrategyError
from tests.distributed.training.sync_programs import Sync, Turns, pair, together

#: All tests make their steps by one function.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")]


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
