"""The output of `dflow status` for a running cluster, from two snapshots of it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import jax.numpy as jnp
from msgspec.structs import replace

import dflow
from dflow.cli.live_status import live_view, show_status
from dflow.dashboard.looks import Look, stragglers
from dflow.distributed.wire.messages.observing import ResourceDepth, TaskState, TaskUsage
from dflow.distributed.wire.messages.roster import EdgeTraffic, TaskInfo
from dflow.distributed.wire.messages.status import Status, TaskHealth, WorkerProgress
from dflow.testing import memory_cluster
from tests.dflow.cli.printed import console, printed

PS, W0, W1, W2 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1", "/job:worker/task:2"


def state(steps: int, step_s: float, *depths: ResourceDepth) -> TaskState:
    usage = TaskUsage(0.001 * steps, 0.002 * steps, 5 * steps, 2 * steps, 6 * steps, 100 * steps)
    return TaskState(steps, step_s, steps, 1, 2, 0, depths, usage)


def look(at_s: float, steps: int, sent: int, states: dict[str, TaskState]) -> Look:
    tasks = tuple(TaskInfo(task, "h:1", 0.0) for task in (PS, W0, W1, W2))
    health = (
        TaskHealth(PS, at_s - 0.5, steps, "", None),
        TaskHealth(W0, at_s - 0.5, steps, f"step {steps}", None),
        TaskHealth(W1, at_s - 0.5, 3, "step 4: waits for w", at_s - 70.0),
        TaskHealth(W2, at_s - 8.0, 3, "", None),
    )
    traffic = (EdgeTraffic("w", PS, W0, sent, 1000 * sent, messages=sent // 4),)
    workers = (WorkerProgress(W0, steps, 0.0, {}),)
    return Look(at_s, Status(at_s, tasks, (), workers, steps, 100, (), traffic, {}, health), states)


def text_of(view: Any) -> str:
    return printed(view, width=160)


def row(text: str, task: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(task)).split()


def test_rates_are_those_between_two_looks() -> None:
    before = look(100.0, 10, 40, {PS: state(0, 0.0), W0: state(10, 0.01)})
    now = look(102.0, 30, 80, {PS: state(0, 0.0, ResourceDepth("ready", 3, 5)), W0: state(30, 0.02)})
    text = text_of(live_view(before, now))
    assert "step 30/100  10.0 steps/s" in text
    assert row(text, "worker:0")[:5] == ["worker:0", "live", "10.0", "20.0", "ms"]
    assert "ready 3/5" in text
    assert "Sent now: 20.0 kB/s" in text
    assert [line.split() for line in text.splitlines() if "ps:0 -> worker:0" in line] == [
        ["w", "ps:0", "->", "worker:0", "5.0", "20.0", "20.0", "kB/s"]
    ]


def test_what_a_part_costs_now_is_shown_for_each_task_that_says_so() -> None:
    before = look(100.0, 10, 40, {PS: replace(state(0, 0.0), usage=None), W0: state(10, 0.01)})
    now = look(102.0, 30, 80, {PS: replace(state(0, 0.0), usage=None), W0: state(30, 0.02)})
    text = text_of(live_view(before, now))
    assert row(text[text.index("A part of a step now") :], "worker:0") == [
        *("worker:0", "10.0", "3", "%", "1000", "us", "2000", "us", "5.0", "2.0", "6.0", "100", "B")
    ]
    assert "ps:0" not in text[text.index("A part of a step now") : text.index("Sent now")]
    assert "A part of a step now" not in text_of(live_view(look(1.0, 1, 0, {}), look(2.0, 1, 0, {})))


def test_a_task_that_is_stuck_or_silent_or_not_reached_is_told_so() -> None:
    at = look(100.0, 10, 0, {W1: state(3, 0.0), W2: state(3, 0.0)})
    text = text_of(live_view(at, at))
    assert "stalled for 70 s" in text
    assert "silent" in " ".join(row(text, "worker:2"))
    assert "8.0 s ago" in " ".join(row(text, "worker:2"))
    assert "not reached" in " ".join(row(text, "worker:0"))


def test_a_task_whose_connection_has_ended_is_away_and_not_silent() -> None:
    at = look(100.0, 10, 0, {})
    away = Look(at.at_s, replace(at.status, away=(W1, W2)), at.states)
    text = text_of(live_view(at, away))
    assert [row(text, task)[1] for task in ("worker:1", "worker:2")] == ["away", "away"]


def test_a_straggler_takes_more_than_half_as_long_again_as_the_median_of_its_job() -> None:
    states = {W0: state(9, 0.010), W1: state(9, 0.015), W2: state(9, 0.031), PS: state(0, 9.0)}
    assert list(stragglers(states)) == [W2]
    assert stragglers({W0: state(9, 0.010), W1: state(9, 0.0151)}).keys() == {W1}
    assert stragglers({W0: state(9, 0.010), W1: state(9, 0.015)}) == {}


def test_more_tasks_than_fit_are_counted_and_those_in_trouble_come_first() -> None:
    names = [f"/job:worker/task:{number}" for number in range(80)]
    tasks = tuple(TaskInfo(name, "h:1", 0.0) for name in names)
    health = tuple(TaskHealth(name, 100.0, 1, "", 10.0 if name == names[-1] else None) for name in names)
    status = Status(100.0, tasks, (), (), 0, 0, (), (), {}, health)
    at = Look(0.0, status, {name: state(1, 0.0) for name in names})
    text = text_of(live_view(at, at))
    assert "31 more" in text
    assert "stalled for 90 s" in text


def test_a_running_cluster_is_shown_once_or_until_it_is_interrupted() -> None:
    with memory_cluster(ps=1) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            v = dflow.Variable(lambda: jnp.ones(4), name="v")
            queue = dflow.FIFOQueue(4, jnp.zeros(()), name="ready")
        queue.enqueue(jnp.float32(1))
        step = dflow.jit(lambda: v.read().sum())
        made, file = console(160)
        looks = 0

        def wait(seconds: float) -> None:
            nonlocal looks
            looks += 1
            step()
            if looks == 4:
                raise KeyboardInterrupt

        for watch in (False, True):
            show_status(memory.network, memory.coordinator.address, made, watch=watch, wait=wait)
    text = file.getvalue()
    assert looks == 4
    assert text.count("Variables: ") == 1
    assert "ready 1/4" in text
    assert "2 of 2 tasks are up" in text
