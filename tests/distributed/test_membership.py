from dflow.distributed.coordinator_events import Ticked
from dflow.distributed.membership import (
    ConnectionLost,
    HeartbeatArrived,
    Joined,
    LeaveAsked,
    Membership,
    PublishRoster,
    RefuseJoin,
    ReleaseTask,
)
from dflow.distributed.messages import TaskInfo

PS0, WORKER0, WORKER1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"


def cluster() -> Membership:
    return Membership({"ps": 1, "worker": 2}, heartbeat_timeout_s=10.0)


def test_tasks_are_expected_until_they_join() -> None:
    members = cluster()
    assert members.roster().expected == (PS0, WORKER0, WORKER1)
    assert members.handle(Joined(1.0, 7, WORKER0, "h:1")) == [PublishRoster()]
    assert members.roster().expected == (PS0, WORKER1)
    assert members.roster().tasks == (TaskInfo(WORKER0, "h:1", 1.0),)


def test_a_join_sent_again_changes_nothing() -> None:
    members = cluster()
    members.handle(Joined(1.0, 7, WORKER0, "h:1"))
    assert members.handle(Joined(2.0, 7, WORKER0, "h:1")) == []


def test_a_second_live_task_of_one_name_is_refused_with_both_addresses() -> None:
    members = cluster()
    members.handle(Joined(1.0, 7, WORKER0, "h:1"))
    [refusal] = members.handle(Joined(2.0, 8, WORKER0, "h:2"))
    assert isinstance(refusal, RefuseJoin)
    assert "worker:0 is already live at h:1, so the one at h:2 may not join" in refusal.text
    assert members.live_peers() == (7,)


def test_one_connection_joins_as_one_task() -> None:
    members = cluster()
    members.handle(Joined(1.0, 7, WORKER0, "h:1"))
    [refusal] = members.handle(Joined(2.0, 7, WORKER1, "h:1"))
    assert isinstance(refusal, RefuseJoin)
    assert "joined as worker:0 and may not join as worker:1" in refusal.text


def test_silence_for_the_timeout_is_a_leave_and_a_heartbeat_puts_it_off() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    members.handle(Joined(0.0, 8, WORKER1, "h:2"))
    members.handle(HeartbeatArrived(5.0, 8, WORKER1))
    assert members.handle(Ticked(9.9)) == []
    assert members.handle(Ticked(10.0)) == [
        ReleaseTask(WORKER0, 7, "no heartbeat for 10.0 s", silent=True),
        PublishRoster(),
    ]
    assert members.live_peers() == (8,)


def test_a_heartbeat_over_another_connection_counts_for_nothing() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    members.handle(HeartbeatArrived(9.0, 8, WORKER0))
    assert ReleaseTask(WORKER0, 7, "no heartbeat for 10.0 s", silent=True) in members.handle(Ticked(10.0))


def test_a_lost_connection_is_a_leave_at_once_with_its_reason() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    assert members.handle(ConnectionLost(3.0, 7, "reset")) == [ReleaseTask(WORKER0, 7, "reset"), PublishRoster()]
    assert members.handle(ConnectionLost(3.0, 9, "a stranger went")) == []


def test_every_leave_is_kept_and_the_task_may_join_again() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    members.handle(ConnectionLost(3.0, 7, "reset"))
    members.handle(Joined(4.0, 8, WORKER0, "h:2"))
    members.handle(LeaveAsked(6.0, 8, "finished"))
    assert members.roster().tasks == (
        TaskInfo(WORKER0, "h:1", 0.0, 3.0, "reset"),
        TaskInfo(WORKER0, "h:2", 4.0, 6.0, "finished"),
    )
    assert members.absence(WORKER0) == "worker:0 left at 6.0 s: finished"
    assert members.absence(WORKER1) == "worker:1 has not joined"


def test_available_are_the_live_and_the_expected_by_index() -> None:
    members = Membership({"ps": 11})
    members.handle(Joined(0.0, 1, "/job:ps/task:10", "h:1"))
    members.handle(Joined(0.0, 2, "/job:ps/task:3", "h:2"))
    members.handle(ConnectionLost(1.0, 2, "reset"))
    assert members.available("ps") == tuple(f"/job:ps/task:{index}" for index in (0, 1, 2, 4, 5, 6, 7, 8, 9, 10))
    assert members.available("worker") == ()
    assert members.jobs() == ("ps",)


def test_a_task_outside_the_expected_ones_may_join() -> None:
    members = cluster()
    assert members.handle(Joined(0.0, 1, "/job:eval/task:0", "h:1")) == [PublishRoster()]
    assert members.jobs() == ("eval", "ps", "worker")
