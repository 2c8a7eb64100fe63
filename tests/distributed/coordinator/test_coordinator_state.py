from collections.abc import Iterable

import pytest

from dflow.distributed.coordinator.coordinator_events import (
    Asked,
    Broadcast,
    Command,
    Event,
    Log,
    PeerClosed,
    Persist,
    SendReply,
    Ticked,
    Told,
)
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.coordinator_role import make_coordinator_state
from dflow.distributed.training.work_messages import Claimed, ClaimSteps, TrainingEvent
from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.distributed.wire.messages.coordination import ElectOnce
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.observing import DumpEvents
from dflow.distributed.wire.messages.placement import PlaceVariable, Unplace
from dflow.distributed.wire.messages.roster import Announcement, EdgeTraffic, Heartbeat, Join, Leave, RosterChange
from dflow.distributed.wire.messages.status import GetHealth, GetStatus, Health, Report, Status
from dflow.distributed.wire.messages.variables import ReadVariables

PS0, WORKER0, WORKER1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"


def cluster() -> CoordinatorState:
    """An expected ps that has not joined, and two workers that joined over the connections 10 and 11."""
    state = make_coordinator_state({"ps": 1, "worker": 2})
    state.handle(Asked(0.0, 10, 0, Join(WORKER0, "h:0")))
    state.handle(Asked(0.0, 11, 1, Join(WORKER1, "h:1")))
    return state


def replies(commands: Iterable[Command]) -> list[SendReply]:
    return [command for command in commands if isinstance(command, SendReply)]


def answer(commands: Iterable[Command], ask: int) -> Message:
    [message] = [command.message for command in commands if isinstance(command, SendReply) and command.ask == ask]
    return message


def status(state: CoordinatorState, at_s: float = 50.0) -> Status:
    message = answer(state.handle(Asked(at_s, 99, 999, GetStatus())), 999)
    assert isinstance(message, Status)
    return message


@pytest.mark.parametrize(
    ("task", "text"), [(WORKER0, "already live at h:0"), ("worker0", "'worker0' is not the name of a task")]
)
def test_a_join_that_is_refused_is_told_to_nobody(task: str, text: str) -> None:
    [reply] = cluster().handle(Asked(1.0, 12, 2, Join(task, "h:9")))
    assert isinstance(reply, SendReply)
    assert isinstance(reply.message, Failure)
    assert text in reply.message.text


def test_nobody_speaks_for_a_task_that_has_left_or_that_is_another() -> None:
    state = cluster()
    state.handle(PeerClosed(3.0, 10, "reset"))
    refusal = answer(state.handle(Asked(3.5, 99, 2, ClaimSteps("run", WORKER0, 1, 1))), 2)
    assert isinstance(refusal, Failure)
    assert "worker:0 is away since its connection ended: reset" in refusal.text
    state.handle(Ticked(4.0))
    refusal = answer(state.handle(Asked(4.0, 99, 2, ClaimSteps("run", WORKER0, 1, 1))), 2)
    assert isinstance(refusal, Failure)
    assert refusal.kind == "TaskLost"
    assert "worker:0 left at 4.0 s: reset" in refusal.text
    refusal = answer(state.handle(Asked(4.0, 10, 3, ElectOnce("init", WORKER1))), 3)
    assert isinstance(refusal, Failure)
    assert "ElectOnce came in the name of worker:1" in refusal.text


def test_a_client_that_is_no_task_places_and_reports_nothing() -> None:
    state = cluster()
    state.handle(Asked(1.0, 10, 2, PlaceVariable("w", "float32", (2,), 8, "ps")))
    for message in (PlaceVariable("v", "float32", (2,), 8, "ps"), Unplace("w"), Report("accuracy", 0.5)):
        state.handle(Told(1.0, 77, message))
        refusal = answer(state.handle(Asked(1.0, 77, 3, message)), 3)
        assert isinstance(refusal, Failure)
        assert f"{type(message).__name__} is taken from tasks alone" in refusal.text
    now = status(state)
    assert [variable.name for variable in now.variables] == ["w"]
    assert now.results == {}


def test_traffic_and_results_are_in_the_status_after_the_task_has_left() -> None:
    state = cluster()
    sent = EdgeTraffic("w", PS0, WORKER0, 3, 24)
    state.handle(Told(1.0, 10, Heartbeat(WORKER0, (sent,))))
    state.handle(Told(1.0, 77, Heartbeat(WORKER0, (EdgeTraffic("w", PS0, WORKER0, 9, 99),))))
    assert answer(state.handle(Asked(1.0, 10, 1, Report("accuracy", 0.5))), 1) == Ok()
    assert answer(state.handle(Asked(1.0, 10, 2, Report("accuracy", 0.75))), 2) == Ok()
    state.handle(PeerClosed(2.0, 10, "reset"))
    now = status(state, 7.0)
    assert (now.now_s, now.traffic, now.results) == (7.0, (sent,), {"accuracy": 0.75})


def test_a_result_of_an_evaluation_has_its_step_and_one_that_is_reported_has_none() -> None:
    state = cluster()
    for steps in (125, 250):
        state.handle(Told(1.0, 10, TrainingEvent("fit", WORKER0, "evaluation", steps, {"auc": 0.5})))
    state.handle(Asked(1.0, 10, 1, Report("accuracy", 0.5)))
    now = status(state, 2.0)
    assert now.results == {"evaluation/auc": 0.5, "accuracy": 0.5}
    assert now.result_steps == {"evaluation/auc": 250}


def test_a_closing_task_says_so_without_waiting_for_an_answer() -> None:
    state = cluster()
    state.handle(Told(2.0, 11, Leave(WORKER0, "finished")))
    assert status(state).tasks[0].left == "", "it was said over a connection of another"
    state.handle(Told(2.0, 10, Leave(WORKER0, "finished")))
    assert status(state).tasks[0].left == "finished"


def test_a_record_is_persisted_before_its_reply_and_its_news() -> None:
    state = make_coordinator_state({"worker": 2})
    commands = state.handle(Asked(0.0, 10, 0, Join(WORKER0, "h:0")))
    assert [type(command) for command in commands] == [Persist, SendReply, Broadcast]


def test_nothing_is_written_for_heartbeats_traffic_ticks_and_questions() -> None:
    state = cluster()
    sent = (EdgeTraffic("w", PS0, WORKER0, 3, 24),)
    events: list[Event] = [Told(1.0, 10, Heartbeat(WORKER0, sent)), Ticked(2.0), Asked(3.0, 10, 2, GetStatus())]
    assert not [command for event in events for command in state.handle(event) if isinstance(command, Persist)]


def test_a_task_that_is_heard_and_ends_no_step_is_stalled_and_the_log_says_so_once() -> None:
    state = cluster()
    for at_s in range(0, 64, 4):
        state.handle(Told(at_s, 10, Heartbeat(WORKER0, (), 12, "step 13: waits for edge 'w'")))
        state.handle(Told(at_s, 11, Heartbeat(WORKER1, (), at_s, "step")))
    text = "worker:0 is alive and has ended no step for 60.5 s; it is at: step 13: waits for edge 'w'"
    assert state.handle(Ticked(60.5)) == [Log(text), Broadcast((10, 11), DumpEvents(text))]
    assert state.handle(Ticked(61.0)) == []
    first, second = status(state, 61.0).health
    assert (first.heard_at_s, first.stalled_since_s, second.stalled_since_s) == (60, 0, None)
    assert answer(state.handle(Asked(61.0, 99, 2, GetHealth(WORKER0))), 2) == Health(61.0, first, "")
    assert state.handle(Told(62.0, 10, Heartbeat(WORKER0, (), 13, "step 14"))) == [Log("worker:0 goes on after 62.0 s")]


def test_a_task_that_holds_claimed_steps_is_at_work_though_it_runs_none() -> None:
    state = cluster()
    state.handle(Asked(0.0, 10, 2, ClaimSteps("run", WORKER0, 1, 1)))
    for at_s in range(0, 64, 4):
        state.handle(Told(at_s, 10, Heartbeat(WORKER0)))
        state.handle(Told(at_s, 11, Heartbeat(WORKER1)))
    state.handle(Asked(59.0, 11, 3, ClaimSteps("run", WORKER1, 1, 1)))
    log, _ = state.handle(Ticked(60.0))
    assert log == Log(
        "worker:0 is alive and has ended no step for 60.0 s; it is at: 1 claimed steps of run 'run', from 0 on "
        "(waiting for them: worker:1)"
    )
    assert [(one.task, one.held) for one in status(state).workers] == [(WORKER0, 1), (WORKER1, 0)]


def test_the_health_of_a_task_that_is_not_there_says_why() -> None:
    state = cluster()
    assert answer(state.handle(Asked(1.0, 99, 2, GetHealth(PS0))), 2) == Health(1.0, None, "ps:0 has not joined")
    assert answer(state.handle(Asked(1.0, 99, 3, GetHealth(WORKER0))), 3) == Health(1.0, None, "")
    state.handle(Told(1.0, 10, Heartbeat(WORKER0)))
    state.handle(Asked(2.0, 10, 4, Leave(WORKER0, "finished")))
    left = Health(3.0, None, "worker:0 left at 2.0 s: finished")
    assert answer(state.handle(Asked(3.0, 99, 5, GetHealth(WORKER0))), 5) == left
    assert status(state).health == ()


def test_a_message_meant_for_a_task_is_refused() -> None:
    refusal = answer(cluster().handle(Asked(1.0, 10, 2, ReadVariables(("w",)))), 2)
    assert isinstance(refusal, Failure)
    assert "answers no ReadVariables" in refusal.text


# The flight recorder.


def dumps(commands: Iterable[Command]) -> list[tuple[int, ...]]:
    """Destinations of the requests for the last events."""
    return [c.peers for c in commands if isinstance(c, Broadcast) and isinstance(c.message, DumpEvents)]


def test_many_who_tell_of_a_stall_at_once_have_it_passed_on_once() -> None:
    state = cluster()
    passed_on = [
        dumps(state.handle(Told(at_s, peer, DumpEvents("x did not come", task))))
        for at_s, peer, task in ((1.0, 10, WORKER0), (1.1, 11, WORKER1), (5.9, 11, WORKER1), (6.0, 11, WORKER1))
    ]
    assert passed_on == [[(11,)], [], [], [(10,)]]


def test_a_stall_told_by_no_task_or_in_anothers_name_is_passed_over() -> None:
    state = cluster()
    assert dumps(state.handle(Told(1.0, 12, DumpEvents("x", WORKER0)))) == []
    assert dumps(state.handle(Told(1.0, 11, DumpEvents("x", WORKER0)))) == []
    assert dumps(state.handle(Told(1.0, 12, DumpEvents("x")))) == []


def test_a_task_that_holds_a_variable_is_away_where_another_has_left() -> None:
    state = cluster()
    state.handle(Asked(0.0, 12, 2, Join(PS0, "h:2", "p")))
    state.handle(Asked(0.0, 13, 3, Join("/job:ps/task:1", "h:3", "q")))
    state.handle(Asked(0.0, 10, 4, PlaceVariable("w", "float32", (), 4, "ps")))
    for tick in range(1, 41):
        state.handle(Ticked(tick / 2))
    found = status(state)
    assert [(info.task, info.left_at_s) for info in found.tasks] == [
        (WORKER0, 10.0),
        (WORKER1, 10.0),
        (PS0, None),
        ("/job:ps/task:1", 10.0),
    ]
    assert found.away == (PS0,)
    back = state.handle(Told(21.0, 12, Heartbeat(PS0)))
    assert back == [Log("ps:0 is back after 21.0 s"), Broadcast((), Announcement("ps:0 is back after 21.0 s"))]


def test_a_task_hears_of_a_death_before_it_gets_the_steps_of_the_dead() -> None:
    state = cluster()
    state.handle(Asked(1.0, 10, 2, ClaimSteps("run", WORKER0, 1, number=1)))
    assert not replies(state.handle(Asked(1.0, 11, 3, ClaimSteps("run", WORKER1, 1, number=1))))
    commands = state.handle(Told(2.0, 10, Leave(WORKER0, "killed")))
    found = [command for command in commands if isinstance(command, (SendReply, Broadcast))]
    assert [type(command.message) for command in found] == [RosterChange, Claimed]
