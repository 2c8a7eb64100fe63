"""A member of a group: errors of its computations, when another member has left or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from dflow.distributed.collectives import process_group
from dflow.distributed.collectives.group_messages import Exchange, Exchanged, GroupFormed
from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.distributed.process.termination import Terminated
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from dflow.tracing.errors import StrategyError, TaskLost

TASKS = "/job:worker/task:0", "/job:worker/task:1"


class Coordinator:
    """The coordinator as a member sees it: every other member says what this one says."""

    task = TASKS[0]

    def __init__(self) -> None:
        self.session = self
        self.asked: list[str] = []
        self.look: Callable[[Roster], None] | None = None
        self.refuse: Callable[[str], None] | None = None

    def call_on_roster(self, look: Callable[[Roster], None]) -> None:
        self.look = look

    def call_on_lost(self, refuse: Callable[[str], None]) -> None:
        self.refuse = refuse

    def ask(self, message: Exchange, timeout_s: float) -> Exchanged:
        self.asked.append(message.name)
        return Exchanged((message.word,) * len(TASKS))

    def leave(self, reason: str) -> None:
        self.asked.append(f"leave: {reason}")

    def lose(self, left: str) -> None:
        assert self.look is not None
        infos = [TaskInfo(TASKS[0], "", 0.0, life=1), TaskInfo(TASKS[1], "", 0.0, 1.0, left, life=2)]
        self.look(Roster(tuple(infos), ()))


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def group(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    monkeypatch.setattr(process_group, "CAUSE_S", 0.05)
    made = ProcessGroup(coordinator, GroupFormed(TASKS, (1, 2)), 1.0)
    yield made
    made.close()  # otherwise the group ends this process


def fail(group: ProcessGroup, error: Exception) -> None:
    with group.computing():
        raise error


def test_a_collective_that_fails_with_a_member_names_that_member(group: ProcessGroup, coordinator: Coordinator) -> None:
    coordinator.lose("its process has ended")
    fact = (
        r"the group of worker:0, worker:1 is over: worker:1 has left: its process has ended(.|\n)*start its processes"
    )
    with pytest.raises(TaskLost, match=fact) as raised:
        fail(group, ValueError("Gloo AllReduce failed"))
    assert str(raised.value.__cause__) == "Gloo AllReduce failed"


def test_a_process_that_the_coordinator_refuses_is_in_no_group(group: ProcessGroup, coordinator: Coordinator) -> None:
    assert coordinator.refuse is not None
    coordinator.refuse("the coordinator did not take this task back")
    with pytest.raises(TaskLost, match="is over: the coordinator did not take this task back"):
        fail(group, ValueError("Gloo AllReduce failed"))


@pytest.mark.parametrize("left", ["", "finished"])
def test_an_error_without_a_loss_is_raised_as_it_is(group: ProcessGroup, coordinator: Coordinator, left: str) -> None:
    if left:
        coordinator.lose(left)
    with pytest.raises(ValueError, match="of the step"):
        fail(group, ValueError("of the step"))


def test_an_error_of_dflow_is_raised_without_a_wait(
    group: ProcessGroup, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "CAUSE_S", 1e9)
    with pytest.raises(StrategyError, match="of the step"):
        fail(group, StrategyError("of the step"))


@pytest.mark.usefixtures("default_termination")
@pytest.mark.parametrize("is_agreed", [True, False])
def test_a_stop_of_all_processes_waits_for_their_checkpoint(
    group: ProcessGroup, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, is_agreed: bool
) -> None:
    def end(status: int) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(process_group, "_end_now", end)
    Terminated("SIGTERM has come to worker:1", is_agreed=is_agreed)
    with pytest.raises(SystemExit, match="143"):
        group._end_of_program()
    assert coordinator.asked == ["the end of the program"] * is_agreed + ["leave: SIGTERM has come to worker:1"]
