import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflow.distributed.coordinator import membership
from dflow.distributed.coordinator.coordinator_events import Started, Ticked
from dflow.distributed.coordinator.durable_records import DurableRecords, apply_changes
from dflow.distributed.coordinator.membership import (
    PUBLISH_AT_ONCE,
    ConnectionLost,
    EndConnection,
    HeartbeatArrived,
    Joined,
    LeaveAsked,
    Membership,
    PublishRoster,
    RefuseJoin,
    ReleaseTask,
)
from dflow.distributed.wire.messages.roster import Roster, RosterChange, TaskInfo, changed_roster
from tests.effort import examples

PS0, WORKER0, WORKER1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"


def cluster() -> Membership:
    return Membership({"ps": 1, "worker": 2}, heartbeat_timeout_s=10.0)


def test_tasks_are_expected_until_they_join() -> None:
    members = cluster()
    assert members.roster().expected == (PS0, WORKER0, WORKER1)
    assert members.handle(Joined(1.0, 7, WORKER0, "h:1")) == [PublishRoster(0, 1, (0,))]
    assert members.roster().expected == (PS0, WORKER1)
    assert members.roster().tasks == (TaskInfo(WORKER0, "h:1", 1.0),)


def test_a_join_sent_again_changes_nothing() -> None:
    members = cluster()
    members.handle(Joined(1.0, 7, WORKER0, "h:1"))
    assert members.handle(Joined(2.0, 7, WORKER0, "h:1")) == []


def test_a_second_live_task_of_one_name_is_refused_with_both_addresses() -> None:
    members = cluster()
    members.handle(Joined(1.0, 7, WORKER0, "h:1"))
    [refusal] = members.handle(Joined(2.0, 8, WORKER0, "h:2;unix:/folder/socket@boot/0"))
    assert isinstance(refusal, RefuseJoin)
    assert "worker:0 is already live at h:1, so the one at h:2 may not join" in refusal.text
    assert members.live_peers() == (7,)


def test_a_task_is_away_from_the_end_of_its_connection_until_it_comes_back_or_has_left() -> None:
    members = cluster()
    members.handle(Joined(1.0, 7, WORKER0, "h:1", "x"))
    members.handle(Joined(1.0, 8, WORKER1, "h:2", "y"))
    members.handle(ConnectionLost(2.0, 7, "reset"))
    members.handle(ConnectionLost(2.0, 8, "reset"))
    assert members.away() == (WORKER0, WORKER1)
    members.handle(Joined(2.5, 9, WORKER0, "h:1", "x"))
    assert members.away() == (WORKER1,)
    members.handle(Ticked(3.5))
    assert members.away() == ()


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
        ReleaseTask(WORKER0, 0, "no heartbeat for 10.0 s"),
        EndConnection(7, "no heartbeat for 10.0 s"),
        PublishRoster(2, 3, (0,)),
    ]
    assert members.live_peers() == (8,)


def test_a_heartbeat_over_another_connection_counts_for_nothing() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    members.handle(HeartbeatArrived(9.0, 8, WORKER0))
    assert ReleaseTask(WORKER0, 0, "no heartbeat for 10.0 s") in members.handle(Ticked(10.0))


def test_one_whose_connection_ended_is_away_for_a_while_and_has_then_left_for_that_reason() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    assert members.handle(ConnectionLost(3.0, 7, "reset")) == []
    assert members.handle(ConnectionLost(3.0, 9, "a stranger went")) == []
    assert members.live_peers() == ()
    assert members.handle(Ticked(3.9)) == []
    assert members.handle(Ticked(4.0)) == [ReleaseTask(WORKER0, 0, "reset"), PublishRoster(1, 2, (0,))]


def test_to_be_away_puts_the_end_of_a_silent_task_not_off() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    members.handle(ConnectionLost(9.5, 7, "reset"))
    assert ReleaseTask(WORKER0, 0, "reset") in members.handle(Ticked(10.0))


def test_the_same_incarnation_comes_back_as_the_member_it_was_and_nobody_is_told() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1", "a"))
    before = members.roster()
    members.handle(ConnectionLost(3.0, 7, "reset"))
    assert members.handle(Joined(3.5, 8, WORKER0, "h:1", "a")) == []
    assert members.is_live(WORKER0, 8)
    assert members.handle(Ticked(13.4)) == []
    assert members.roster() == before


def test_a_second_connection_of_the_same_incarnation_takes_the_place_of_the_first() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1", "a"))
    [end] = members.handle(Joined(1.0, 8, WORKER0, "h:1", "a"))
    assert end == EndConnection(7, "worker:0 has come over another connection")
    assert not members.is_live(WORKER0, 7)
    assert members.handle(ConnectionLost(1.1, 7, "closed")) == []
    assert members.live_peers() == (8,)


def test_another_incarnation_takes_the_place_of_one_that_is_away() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1", "a"))
    members.handle(ConnectionLost(3.0, 7, "killed"))
    assert members.handle(Joined(3.1, 8, WORKER0, "h:2", "b")) == [
        ReleaseTask(WORKER0, 0, "it has started anew"),
        PublishRoster(1, 3, (0, 1)),
    ]
    assert [info.incarnation for info in members.roster().tasks] == ["a", "b"]
    assert members.life(WORKER0) == 1


def test_one_that_was_given_up_may_not_come_back_in_that_incarnation() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1", "a"))
    members.handle(Ticked(10.0))
    [refusal] = members.handle(Joined(11.0, 8, WORKER0, "h:1", "a"))
    assert isinstance(refusal, RefuseJoin)
    assert refusal.kind == "TaskLost"
    assert "worker:0 left at 10.0 s: no heartbeat for 10.0 s; its work has gone to others" in refusal.text
    assert members.handle(Joined(12.0, 8, WORKER0, "h:1", "b")) == [PublishRoster(2, 3, (1,))]


def test_a_task_of_another_cluster_is_refused_with_both_names() -> None:
    members = cluster()
    members.handle(Started(0.0, "blue"))
    [refusal] = members.handle(Joined(1.0, 7, WORKER0, "h:1", "a", "red"))
    assert isinstance(refusal, RefuseJoin)
    assert refusal.kind == "TaskLost"
    assert "worker:0 is a task of cluster red, and this is the coordinator of blue" in refusal.text
    assert members.handle(Joined(1.0, 7, WORKER0, "h:1", "a", "blue")) == [PublishRoster(0, 1, (0,))]


def restarted(records: DurableRecords, rows: dict[str, bytes], at_s: float) -> Membership:
    """The members after a restart of the coordinator."""
    apply_changes(rows, records.take_changes())
    again = Membership({"ps": 1, "worker": 2}, heartbeat_timeout_s=10.0, records=DurableRecords(rows))
    again.handle(Started(at_s, "other"))
    return again


def test_after_a_restart_the_members_are_those_of_before_and_have_a_while_to_come_back() -> None:
    records, rows = DurableRecords(), dict[str, bytes]()
    members = Membership({"ps": 1, "worker": 2}, records=records)
    members.handle(Started(0.0, "blue"))
    members.handle(Joined(1.0, 7, WORKER0, "h:1", "a"))
    members.handle(Joined(2.0, 8, WORKER1, "h:2", "b"))
    members.handle(LeaveAsked(3.0, 8, "finished"))
    before = members.roster()
    again = restarted(records, rows, 50.0)
    assert again.roster() == Roster(before.tasks, before.expected, before.version, "blue", 2)
    assert again.live_peers() == ()
    assert again.handle(Ticked(59.9)) == []
    assert again.handle(Joined(59.9, 7, WORKER0, "h:1", "a", "blue")) == []
    assert again.handle(Ticked(69.8)) == []
    late = restarted(records, rows, 50.0)
    assert late.handle(Ticked(60.0)) == [
        ReleaseTask(WORKER0, 0, "it did not come back within 10.0 s of the coordinator's restart"),
        PublishRoster(3, 4, (0,)),
    ]
    assert late.roster().version == before.version + 1


def test_every_leave_is_kept_and_the_task_may_join_again() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    members.handle(LeaveAsked(3.0, 7, "reset"))
    members.handle(Joined(4.0, 8, WORKER0, "h:2"))
    members.handle(LeaveAsked(6.0, 8, "finished"))
    assert members.roster().tasks == (
        TaskInfo(WORKER0, "h:1", 0.0, 3.0, "reset"),
        TaskInfo(WORKER0, "h:2", 4.0, 6.0, "finished", life=1),
    )
    assert members.absence(WORKER0) == "worker:0 left at 6.0 s: finished"
    assert members.absence(WORKER1) == "worker:1 has not joined"


def test_of_those_that_have_left_the_last_are_listed_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.distributed.coordinator.membership.MOST_LEFT", 2)
    rows: dict[str, bytes] = {}
    records = DurableRecords(rows)
    members = Membership({}, records=records)
    [*_, joined] = members.handle(Joined(0.0, 1, PS0, "h:0", "stays"))
    assert joined == PublishRoster(0, 1, (0,))
    seen = Roster((members.entry(0),), (), 1)
    for life in range(1, 6):
        members.handle(Joined(float(life), 1 + life, WORKER0, "h:1", f"life {life}"))
        [_, publish] = members.handle(LeaveAsked(life + 0.5, 1 + life, "reset"))
        assert isinstance(publish, PublishRoster)
        assert publish.dropped == ((life - 2,) if life > 2 else ())
        change = RosterChange(seen.version, publish.version, tuple(map(members.entry, publish.lives)), publish.dropped)
        seen = changed_roster(seen, change)
        assert seen.tasks == members.roster().tasks
    assert [info.incarnation for info in seen.tasks] == ["stays", "life 4", "life 5"]
    assert members.left_in_all == 5
    apply_changes(rows, records.take_changes())
    again = Membership({}, records=DurableRecords(rows))
    assert again.roster().tasks == members.roster().tasks
    assert again.left_in_all == 5
    again.handle(Joined(9.0, 1, WORKER1, "h:2"))
    assert again.life(WORKER1) == 6, "no number is given out twice"


def test_available_are_the_live_and_the_expected_by_index() -> None:
    members = Membership({"ps": 11})
    members.handle(Joined(0.0, 1, "/job:ps/task:10", "h:1"))
    members.handle(Joined(0.0, 2, "/job:ps/task:3", "h:2"))
    members.handle(LeaveAsked(1.0, 2, "reset"))
    assert members.available("ps") == tuple(f"/job:ps/task:{index}" for index in (0, 1, 2, 4, 5, 6, 7, 8, 9, 10))
    assert members.available("worker") == ()
    assert members.jobs() == ("ps",)


def test_a_task_outside_the_expected_ones_may_join() -> None:
    members = cluster()
    assert members.handle(Joined(0.0, 1, "/job:eval/task:0", "h:1")) == [PublishRoster(0, 1, (0,))]
    assert members.jobs() == ("eval", "ps", "worker")


def test_changes_of_a_large_cluster_are_published_together_at_the_next_tick() -> None:
    members = Membership({})
    tasks = [f"/job:worker/task:{index}" for index in range(PUBLISH_AT_ONCE + 3)]
    published = [len(members.handle(Joined(0.0, peer, task, "h"))) for peer, task in enumerate(tasks)]
    assert published == [1] * PUBLISH_AT_ONCE + [0, 0, 0]
    count = PUBLISH_AT_ONCE
    assert members.handle(LeaveAsked(0.0, 0, "finished")) == [ReleaseTask(tasks[0], 0, "finished")]
    assert members.roster().version == count + 4, "who joins now sees all that has happened"
    assert members.handle(Ticked(0.5)) == [PublishRoster(count, count + 4, (0, count, count + 1, count + 2))]
    assert members.handle(Ticked(1.0)) == []


def test_a_pause_of_the_coordinator_itself_is_no_silence_of_the_tasks() -> None:
    members = cluster()
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    members.handle(HeartbeatArrived(7.0, 7, WORKER0))
    members.handle(Ticked(7.5))
    assert members.handle(Ticked(22.0)) == [], "nothing could be heard since 7.5"
    assert members.handle(Ticked(22.5)) == []
    assert members.handle(Ticked(26.9)) == []
    assert ReleaseTask(WORKER0, 0, "no heartbeat for 10.0 s") in members.handle(Ticked(31.5))


def test_ticks_at_their_pace_excuse_nobody_however_short_the_time_for_heartbeats() -> None:
    members = Membership({}, heartbeat_timeout_s=0.5)
    members.handle(Joined(0.0, 7, WORKER0, "h:1"))
    members.handle(Ticked(0.1))
    assert members.handle(Ticked(0.4)) == []
    assert len(members.handle(Ticked(0.9))) == 3


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.sampled_from(["join", "leave", "restart"]), st.integers(0, 3)), max_size=30),
)
@example([("leave", 0), *((act, index) for index in range(3) for act in ("join", "leave"))])
def test_the_changes_since_a_version_make_the_newest_roster_of_the_one_of_then(
    acts: list[tuple[str, int]],
) -> None:
    rows: dict[str, bytes] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "MOST_LEFT", 2)
        records = DurableRecords(rows)
        members = Membership({"worker": 3}, records=records)
        rosters, peers = {}, dict[str, int]()
        for number, (act, index) in enumerate(acts):
            name = f"/job:worker/task:{index}"
            if act == "join":
                members.handle(Joined(float(number), number, name, "h:1", f"{number}"))
                peers.setdefault(name, number)
            elif act == "leave" and name in peers:
                members.handle(LeaveAsked(float(number), peers.pop(name), "done"))
            apply_changes(rows, records.take_changes())
            if act == "restart":
                records = DurableRecords(rows)
                members = Membership({"worker": 3}, records=records)
                members.handle(Started(float(number), "blue"))
                peers.clear()
            rosters[members.version] = members.roster()
    for version, roster in rosters.items():
        change = members.changes_since(version)
        if change is not None:
            found, newest = changed_roster(roster, change), members.roster()
            assert sorted(found.tasks, key=lambda info: info.life) == list(newest.tasks)
            assert (found.expected, found.version, found.epoch) == (newest.expected, newest.version, newest.epoch)
    assert members.changes_since(members.version) is not None
    assert members.changes_since(members.version + 1) is None
