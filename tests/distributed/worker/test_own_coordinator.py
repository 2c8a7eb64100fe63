"""A process in no cluster asks the coordinator's own state."""

from __future__ import annotations

import pytest

from dflow.distributed.wire.messages.barriers import AwaitBarrier
from dflow.distributed.wire.messages.claims import ClaimSteps
from dflow.distributed.wire.messages.elections import ElectOnce
from dflow.distributed.wire.messages.rounds import RoundsDone
from dflow.distributed.wire.messages.status import GetStatus
from dflow.distributed.worker.own_coordinator import OwnCoordinator
from dflow.distributed.worker.standalone import Alone
from dflow.tracing.errors import RemoteError

TASK = "/job:localhost/task:0"


def test_the_only_task_is_elected_each_time_and_passes_each_barrier() -> None:
    coordinator = OwnCoordinator(TASK)
    assert [coordinator.ask(ElectOnce("init", TASK)).elected for _ in range(2)] == [True, True]
    passed = [coordinator.ask(AwaitBarrier("epoch", TASK)) for _ in range(2)]
    assert [(one.generation, one.members) for one in passed] == [(1, (TASK,)), (2, (TASK,))]
    assert Alone().barrier("epoch", timeout_s=0.0) == (TASK,)


def test_claims_are_numbered_so_that_reported_steps_count() -> None:
    coordinator = OwnCoordinator(TASK)
    first = coordinator.ask(ClaimSteps("run", TASK, 20)).steps
    second = coordinator.ask(ClaimSteps("run", TASK, 20, done=len(first))).steps
    assert second.start == first.stop
    assert coordinator.ask(GetStatus()).steps_done == len(first)


def test_a_refusal_is_raised_and_a_notice_is_taken() -> None:
    coordinator = OwnCoordinator(TASK)
    with pytest.raises(RemoteError, match=r"run 'run': localhost:0 asks for -1 steps in all; ask for 0 or more"):
        coordinator.ask(ClaimSteps("run", TASK, -1))
    coordinator.tell(RoundsDone("run", TASK, 3, 4, 3))
    assert (coordinator.ask(GetStatus()).steps_done, coordinator.ask(GetStatus()).steps_total) == (3, 4)
