"""A pause of the steps and the claims of workers, as the coordinator decides them together."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dflow.distributed.asynchronous.step_claims import StepClaims
from dflow.distributed.coordinator.coordinator_events import Asked, Broadcast, Command, SendReply, Told
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.coordinator.durable_records import apply_changes
from dflow.distributed.coordinator_role import make_coordinator_state
from dflow.distributed.snapshots.pause_messages import HoldSteps, PauseSteps, StepsHeld
from dflow.distributed.training.work_messages import Claimed, ClaimSteps, StepsDone
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import Join, Leave

WORKER0, WORKER1, WORKER2 = (f"/job:worker/task:{index}" for index in range(3))
#: Two workers join over the connections 10 and 11, and the second claims the steps 0 to 4.
BEGINNING = [
    Asked(0.0, 10, 0, Join(WORKER0, "h:0")),
    Asked(0.0, 11, 1, Join(WORKER1, "h:1")),
    Asked(0.0, 11, 2, ClaimSteps("run", WORKER1, 20, 1)),
]


@pytest.fixture
def state() -> CoordinatorState:
    state = make_coordinator_state({"worker": 2})
    for event in BEGINNING:
        state.handle(event)
    return state


def answers(commands: Iterable[Command]) -> dict[int, Message]:
    return {command.ask: command.message for command in commands if isinstance(command, SendReply)}


def holds(commands: Iterable[Command]) -> list[int]:
    messages = [command.message for command in commands if isinstance(command, Broadcast)]
    return [message.number for message in messages if isinstance(message, HoldSteps)]


def test_a_pause_begins_when_another_worker_has_done_what_a_dead_one_left(state: CoordinatorState) -> None:
    state.handle(Asked(0.1, 12, 3, Join(WORKER2, "h:2")))
    assert answers(state.handle(Asked(0.2, 12, 4, ClaimSteps("run", WORKER2, 20, 1)))) == {4: Claimed(5, 1)}
    state.handle(Told(0.3, 11, StepsDone("run", WORKER1, 0, 2)))
    state.handle(Asked(0.4, 11, 5, Leave(WORKER1, "killed")))  # it leaves the steps 2 to 4
    assert not holds(state.handle(Asked(0.5, 10, 6, PauseSteps(WORKER0))))
    for number in (2, 3, 4):
        ask, step = 5 + number, number
        claimed = answers(state.handle(Asked(0.6, 12, ask, ClaimSteps("run", WORKER2, 20, number, number - 1, 1))))
        assert claimed == {ask: Claimed(step, 1)}
        assert holds(state.handle(Told(0.7, 12, StepsDone("run", WORKER2, step, 1)))) == ([1] if step == 4 else [])


def test_a_pause_does_not_wait_for_the_step_that_the_asking_worker_has_claimed(state: CoordinatorState) -> None:
    """It asks when it has done the step, and the report may be lost with the coordinator that it was sent to."""
    state.handle(Told(0.1, 11, StepsDone("run", WORKER1, 0, 4)))
    state.handle(Asked(0.2, 11, 3, Leave(WORKER1, "killed")))  # it leaves step 4
    claimed = answers(state.handle(Asked(0.3, 10, 4, ClaimSteps("run", WORKER0, 20, 1))))
    assert claimed == {4: Claimed(4, 1)}
    state.handle(Asked(0.4, 11, 5, Join(WORKER1, "h:1")))
    state.handle(Asked(0.5, 11, 6, ClaimSteps("run", WORKER1, 20, 1)))
    assert holds(state.handle(Asked(0.6, 10, 7, PauseSteps(WORKER0)))) == [1]


def test_a_pause_does_not_wait_for_steps_that_only_the_asking_worker_could_do(state: CoordinatorState) -> None:
    state.handle(Asked(0.1, 10, 3, ClaimSteps("run", WORKER0, 20, 1)))
    state.handle(Asked(0.2, 11, 4, Leave(WORKER1, "killed")))
    assert holds(state.handle(Asked(0.3, 10, 5, PauseSteps(WORKER0)))) == [1]


def test_steps_that_no_worker_is_left_to_do_hold_back_no_pause(state: CoordinatorState) -> None:
    state.handle(Asked(1.0, 11, 3, Leave(WORKER1, "killed")))
    assert Broadcast((10,), HoldSteps(1)) in state.handle(Asked(1.1, 10, 4, PauseSteps(WORKER0)))


def test_the_end_of_the_pausing_task_resumes_the_steps(state: CoordinatorState) -> None:
    state.handle(Asked(1.0, 10, 3, PauseSteps(WORKER0)))
    for peer, task in ((10, WORKER0), (11, WORKER1)):
        state.handle(Told(1.1, peer, StepsHeld(task, 1)))
    assert Broadcast((11,), HoldSteps(0)) in state.handle(Asked(1.2, 10, 4, Leave(WORKER0, "finished")))
    assert answers(state.handle(Asked(1.3, 11, 5, ClaimSteps("run", WORKER1, 20, 5, 1, 5)))) == {5: Claimed(5, 3)}


def test_steps_that_were_left_over_are_known_after_a_restart() -> None:
    rows: dict[str, bytes] = {}
    # The records of the whole history, as the shell writes them.
    again = make_coordinator_state({"worker": 2})
    claimed, left = Asked(0.1, 10, 3, ClaimSteps("run", WORKER0, 20, 1)), Asked(1.0, 11, 5, Leave(WORKER1, "killed"))
    for command in [command for event in (*BEGINNING, claimed, left) for command in again.handle(event)]:
        apply_changes(rows, getattr(command, "changes", ()))
    restarted = make_coordinator_state({"worker": 2}, rows=rows)
    assert not restarted.core.part(StepClaims).is_clear("")
