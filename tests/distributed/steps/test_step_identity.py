"""Numbers of steps: those of a life of a task, and those that a process began and that have not ended."""

from __future__ import annotations

import pytest

from dflow.distributed.steps.plan_checks import MAX_UNFINISHED, check_step_of_run
from dflow.distributed.steps.step_identity import LoopSteps
from dflow.distributed.steps.step_starter import first_of_a_life
from dflow.lowering.queues.channel import STEPS_OF_A_LIFE, StepId
from dflow.lowering.state.applied_steps import StepOfRun
from dflow.testing import memory_cluster
from dflow.tracing.errors import StepEnded, TaskLost, WireError


def attempt(steps: LoopSteps, number: int, error: Exception) -> None:
    with pytest.raises(type(error)), steps.step(number):
        raise error


def test_a_step_that_ended_by_another_attempt_is_not_unfinished() -> None:
    steps = LoopSteps("run", set())
    attempt(steps, 1, TaskLost("ps:0 has left"))
    attempt(steps, 2, TaskLost("ps:0 has left"))
    assert steps.unfinished() == (1, 2)
    attempt(steps, 1, StepEnded("step 1 has ended on all tasks"))
    assert steps.unfinished() == (2,)
    with steps.step(2):
        pass
    assert steps.unfinished() == ()


def test_too_many_steps_that_failed_are_refused_as_such() -> None:
    check_step_of_run(StepOfRun("fit", 1, 0, tuple(range(MAX_UNFINISHED))))
    with pytest.raises(WireError, match=r"'fit': expected at most 4096 steps .*failed, got 4097\n  remove"):
        check_step_of_run(StepOfRun("fit", 1, 0, tuple(range(MAX_UNFINISHED + 1))))


def test_a_run_is_forgotten_with_its_last_loop_unless_a_step_has_not_ended() -> None:
    with memory_cluster(ps=1, workers=1) as memory:
        worker = memory.worker(0)
        steps = worker.steps
        one, other = steps.loop_steps("run"), steps.loop_steps("run")
        steps.loop_ended(one)
        attempt(other, 3, TaskLost("ps:0 has left"))
        steps.loop_ended(other)
        again = steps.loop_steps("run")
        assert again.unfinished() == (3,)
        with again.step(3):
            pass
        steps.loop_ended(again)
        assert steps._unfinished == {}
        worker.close()


def test_a_life_begins_beyond_all_steps_of_the_one_before() -> None:
    first, second = first_of_a_life(), first_of_a_life()
    assert second - first >= STEPS_OF_A_LIFE
    assert StepId("/job:ps/task:0", second + 7).index == 7
    assert second + STEPS_OF_A_LIFE < 1 << 63
