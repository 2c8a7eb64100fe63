"""The coordinator's comparison of the steps and optimizers of the workers of one run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dflow.distributed.coordinator.coordinator_events import Broadcast, SendReply
from dflow.distributed.coordinator.coordinator_part import Received
from dflow.distributed.coordinator.membership import FINISHED, ReleaseTask
from dflow.distributed.training.step_comparisons import KEPT_KEYS, KEPT_RUNS, StepComparisons
from dflow.distributed.training.work_messages import CompareStep, RunRefused, StepCompared
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.message import Message

A, B, C = "/job:worker/task:0", "/job:worker/task:1", "/job:worker/task:2"
LIVE = (1, 2, 3)
RECEIVED = Received(0.0, 1, 4, 0)
CORE: Any = SimpleNamespace(members=SimpleNamespace(live_peers=lambda: LIVE))


def leave(steps: StepComparisons, task: str, reason: str) -> None:
    steps.on_leave([ReleaseTask(task, 0, reason)], 0.0)


def compared(steps: StepComparisons, task: str, *items: str, run: str = "run", key: str = "") -> Message:
    """Return the answer to a worker, which sends its items if they are asked for."""
    digest = " ".join(items)
    answer, *_ = steps.compare(CompareStep(run, task, key, digest), RECEIVED)
    assert isinstance(answer, SendReply)
    if isinstance(answer.message, StepCompared) and not answer.message.is_known:
        answer, *_ = steps.compare(CompareStep(run, task, key, digest, items), RECEIVED)
        assert isinstance(answer, SendReply)
    return answer.message


def test_another_step_is_refused_to_all_with_the_first_difference() -> None:
    steps = StepComparisons(CORE)
    compared(steps, B, "same", "w2")
    request = CompareStep("run", A, "", "digest", ("same", "w", "x"))
    answer, told = steps.compare(request, RECEIVED)
    assert isinstance(answer, SendReply)
    assert isinstance(answer.message, Failure)
    assert answer.message.kind == "StrategyError"
    assert "run 'run': expected" in answer.message.text
    assert "got\n    worker:0: w\n    worker:1: w2\n  make the same variables" in answer.message.text
    assert answer.message.text.endswith("start them again, or give the run another name")
    assert told == Broadcast(LIVE, RunRefused("run", answer.message.text))
    for task in (B, C):
        assert compared(steps, task, "same", "w2") == answer.message


def test_a_step_with_more_is_refused_too() -> None:
    steps = StepComparisons(CORE)
    compared(steps, A, "w")
    failure = compared(steps, B, "w", "more")
    assert isinstance(failure, Failure)
    assert "worker:0: nothing more\n    worker:1: more" in failure.text


def test_the_step_of_a_task_that_failed_is_forgotten_and_that_of_one_that_ended_counts() -> None:
    steps = StepComparisons(CORE)
    compared(steps, A, "wrong")
    assert isinstance(compared(steps, B, "right"), Failure)
    leave(steps, A, "its process has ended")
    assert isinstance(compared(steps, C, "right"), Failure)  # B is refused, and has not left yet
    leave(steps, B, "its process has ended")
    leave(steps, C, "its process has ended")
    assert compared(steps, A, "right") == StepCompared(True)
    leave(steps, A, FINISHED)
    assert isinstance(compared(steps, B, "wrong"), Failure)


def test_the_runs_that_were_compared_last_are_kept() -> None:
    steps = StepComparisons(CORE)
    compared(steps, A, "w", run="long")
    for number in range(2 * KEPT_RUNS):
        compared(steps, A, "w", run=f"run {number}")
        compared(steps, A, "v", run="long", key="another step")
    assert isinstance(compared(steps, B, "w2", run="long"), Failure)
    assert compared(steps, B, "w2", run="run 0") == StepCompared(True)
    assert isinstance(compared(steps, B, "w2", run=f"run {2 * KEPT_RUNS - 1}"), Failure)


def test_the_keys_of_a_run_that_were_compared_last_are_kept() -> None:
    steps = StepComparisons(CORE)
    compared(steps, A, "w", key="often")
    for number in range(KEPT_KEYS):
        compared(steps, A, "w", key=f"{number}")
        compared(steps, C, "w", key="often")
    assert compared(steps, B, "w2", key="0") == StepCompared(True)
    assert isinstance(compared(steps, B, "w2", key="often"), Failure)


def test_functions_of_one_name_on_one_worker_may_differ_and_are_those_of_the_others() -> None:
    steps = StepComparisons(CORE)
    for task in (A, B):
        for what in ("v", "w"):
            assert compared(steps, task, what) == StepCompared(True)
    assert isinstance(compared(steps, C, "x"), Failure)
