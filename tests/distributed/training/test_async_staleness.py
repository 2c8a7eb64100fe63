"""`Async(max_staleness=...)` on a cluster in this process: version counters of each step's reads and updates to."""

from __future__ import annotations

import itertools
import logging
import threading
from contextlib import closing, nullcontext, suppress
from typing import Any

import jax.numpy as jnp
import pytest

import dflow
from dflow.distributed.asynchronous.async_ import Async
from dflow.distributed.asynchronous.staleness import BoundedSteps
from dflow.distributed.asynchronous.staleness_bounds import StalenessBounds
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.training import long_wait
from dflow.distributed.wire.messages.plans import CancelStep
from dflow.distributed.wire.messages.status import GetHealth
from dflow.testing import MemoryCluster
from dflow.tracing.errors import DeadlineExceeded, DflowError, RemoteError, StrategyError
from tests.distributed.task_parts import part_of
from tests.distributed.training.sync_programs import DEADLINE_S, SOON, Turns, together
from tests.distributed.waiting import until

#: All tests make their steps by one function.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")]


class Counted:
    """A counter of updates on each of two tasks, and the staleness of the steps of one worker."""

    def __init__(self, cluster: Cluster) -> None:
        self.variables = []
        with cluster.parameter_servers():
            for index in range(2):
                with dflow.device(f"ps:{index}"):
                    self.variables.append(dflow.Variable(lambda: jnp.int32(0), name=f"count {index}"))
        self.read = dflow.jit(lambda: [variable.read() for variable in self.variables])
        self.add = dflow.jit(lambda x: self._added([x, x]))

        @dflow.jit
        def step(x: Any) -> Any:
            seen = [variable.read() for variable in self.variables]
            return seen, self._added([x + 0 * value for value in seen])

        self.step = step

    def _added(self, deltas: Any) -> Any:
        for variable, delta in zip(self.variables, deltas, strict=True):
            variable.assign_add(delta)
        return [variable.read() for variable in self.variables]

    @staticmethod
    def staleness(outcome: Any) -> int:
        """The most updates of a counter between the step's read and its own update."""
        return max(int(new) - 1 - int(seen) for seen, new in zip(*outcome, strict=True))

    @property
    def counts(self) -> list[int]:
        return [int(variable.read()) for variable in self.variables]


def bounded(memory: MemoryCluster, run: str) -> BoundedSteps | None:
    """The steps of the run, as the task that counts them sees them."""
    runs = (part_of(task.server, StalenessBounds)._runs.get(run) for task in memory.tasks.values())
    return next((found for found in runs if found is not None), None)


def waiting(memory: MemoryCluster, run: str = "run") -> int:
    found = bounded(memory, run)
    return 0 if found is None else len(found.waiting)


def test_values_are_fetched_ahead_where_the_bound_allows_it(
    workers: list[Cluster], no_pause_is_long: None, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(workers[0])

    def stalenesses(name: str, **options: Any) -> list[int]:
        run = Async(workers[0], **options).run(counted.step, itertools.repeat(jnp.int32(1)), steps=12, name=name)
        return [counted.staleness(outcome) for outcome in run]

    assert stalenesses("none ahead", max_staleness=0) == [0] * 12
    assert stalenesses("ahead", max_staleness=3, prefetch=2)[5:] == [2] * 7
    with caplog.at_level(logging.WARNING, "dflow"):
        assert stalenesses("wide", max_staleness=1, prefetch=1)[4:] == [1] * 8
    assert not caplog.records
    both = threading.Barrier(2)
    together(workers[:2], lambda index, cluster: small(cluster, both))
    text = "prefetch=1 has no effect: max_staleness=4 is below 5, which 2 workers need for it"
    assert text in [record.getMessage() for record in caplog.records]


def small(cluster: Cluster, both: threading.Barrier) -> None:
    strategy = Async(cluster, max_staleness=4, prefetch=1)
    for number, _ in enumerate(strategy.run(Counted(cluster).step, itertools.repeat(jnp.int32(1)), steps=40, name="2")):
        if number == 0:
            both.wait(DEADLINE_S)


def test_workers_with_other_bounds_are_refused(workers: list[Cluster]) -> None:
    ones = itertools.repeat(jnp.int32(1))
    run = Async(workers[0], max_staleness=2).run(Counted(workers[0]).step, ones, steps=9, name="run")
    next(run)
    counted = Counted(workers[1])
    for other, text in ((Async(workers[1]), "asks for None"), (Async(workers[1], max_staleness=3), "asks for 3")):
        with pytest.raises(RemoteError, match=rf"'run': worker:0 trains with max_staleness=2 .*{text}; give all"):
            list(other.run(counted.step, ones, steps=9, name="run"))
    run.close()  # type: ignore[attr-defined]

    def trains() -> bool:
        try:
            list(Async(workers[1], max_staleness=3).run(counted.step, ones, steps=9, name="run"))
        except RemoteError:  # the parameter task does not know yet that the first worker has left the run
            return False
        return True

    until(trains)
    assert counted.counts == [9, 9]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefetch": -1}, "prefetch: expected at least 0, got -1"),
        ({"max_staleness": -1}, "max_staleness: expected at least 0, got -1"),
        ({"max_staleness": 1, "prefetch": 2}, "prefetch: expected at most max_staleness=1, got 2.*\n.*\n.*a larger"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        Async(dflow.connect(), **options)  # type: ignore[arg-type]


def test_a_wait_names_the_worker_whose_step_lasts(
    memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(long_wait, "NOTICE_AFTER_S", 0.05)
    quick = ClusterSettings(join_timeout_s=10.0, request_timeout_s=30.0, step_timeout_s=0.5)
    turns = Turns()

    def work(index: int, cluster: Cluster) -> None:
        counted = Counted(cluster)

        def slow(x: Any) -> Any:
            turns.done("0 is in a step")
            turns.wait("1 has abandoned its step")
            return counted.read()

        if index == 0:
            list(Async(cluster, max_staleness=0).run(slow, [jnp.int32(1)], steps=9, name="run"))
            return
        turns.wait("0 is in a step")
        text = "run 'run' with max_staleness=0: no step may begin before the steps of worker:0 have ended"
        with pytest.raises(DeadlineExceeded, match=text):
            list(Async(cluster, max_staleness=0).run(counted.step, [jnp.int32(1)], steps=9, name="run"))
        assert any(f"worker:1 waits, for 0 s: /job:ps/task:0: {text}" in one.getMessage() for one in caplog.records)
        turns.done("1 has abandoned its step")

    with closing(memory.worker(0, SOON)) as first, closing(memory.worker(1, quick)) as second:
        together([first, second], work)
    until(lambda: bounded(memory, "run") is None)  # the last word of a worker may still be on its way


@pytest.mark.parametrize("is_handled", [False, True])
def test_a_step_that_fails_ends_when_its_tasks_have_confirmed_that(
    memory: MemoryCluster, workers: list[Cluster], monkeypatch: pytest.MonkeyPatch, is_handled: bool
) -> None:
    events: list[str] = []
    server, ask = memory.tasks["ps:1"].server, workers[0].requests.ask

    def run(executable: Any, step: Any, *args: Any, **options: Any) -> None:
        if step.origin == workers[0].task:
            until(lambda: waiting(memory) == 1)
            raise ZeroDivisionError
        run_part(executable, step, *args, **options)

    def asked(task: str, message: Any, *args: Any) -> Any:
        reply = ask(task, message, *args)
        if isinstance(message, CancelStep):
            events.append(f"cancelled on {task[-1]}")
        return reply

    run_part = server.runs.run
    monkeypatch.setattr(server.runs, "run", run)
    monkeypatch.setattr(workers[0].requests, "ask", asked)
    turns = Turns()

    def work(index: int, cluster: Cluster) -> None:
        counted = Counted(cluster)

        def step(x: Any) -> Any:
            if index == 0:
                turns.done("0 is in a step")
            events.append(f"{index} begins")
            with suppress(*[DflowError] if is_handled else []):
                return counted.step(x)

        if index:
            turns.wait("0 is in a step")
        ones = [jnp.int32(1)] * (1 if index == 0 else 3)
        run = Async(cluster, max_staleness=0).run(step, ones, steps=3, name="run")
        if index == 0:
            with nullcontext() if is_handled else pytest.raises(DflowError, match="ZeroDivisionError"):
                list(run)
        else:
            assert {counted.staleness(outcome) for outcome in run} == {0}

    together(workers[:2], work)
    assert events == ["0 begins", "cancelled on 0", "cancelled on 1", *["1 begins"] * (2 if is_handled else 3)]


def test_a_step_begins_after_its_worker_knows_of_the_deaths_that_the_host_knows_of(
    memory: MemoryCluster, worker: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    ask = worker.coordinator.ask

    def asked(message: Any, *timeout_s: float) -> Any:
        if isinstance(message, GetHealth):
            events.append("has the roster")
        return ask(message, *timeout_s)

    monkeypatch.setattr(worker.coordinator, "ask", asked)
    counted = Counted(worker)

    def step(x: Any) -> Any:
        events.append("begins")
        return counted.step(x)

    def train(name: str) -> None:
        list(Async(worker, max_staleness=0).run(step, [jnp.int32(1)] * 3, steps=3, name=name))

    train("first")
    assert events == ["begins"] * 3
    events.clear()
    for task in memory.tasks.values():
        monkeypatch.setattr(task.server.member_gate, "death_known_at", worker.server.peers.introduced_at + 1)
    train("second")
    assert events == ["has the roster", *["begins"] * 3]
