"""The members of a cluster: joins, leaves, silence, restarts of the coordinator, and the roster's changes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflow.distributed.coordinator import membership
from dflow.distributed.coordinator.coordinator_events import Broadcast, Disconnect
from dflow.distributed.coordinator.durable_records import DurableRecords, apply_changes
from dflow.distributed.coordinator.membership import PUBLISH_AT_ONCE, Membership, MembershipCommand, ReleaseTask
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.roster import Join, Roster, RosterChange, changed_roster
from tests.effort import examples

PS0, WORKER0, WORKER1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"


def cluster() -> Membership:
    return Membership(DurableRecords(), {"ps": 1, "worker": 2})


Change = tuple[int, int, tuple[int, ...]]


def brief(commands: Iterable[MembershipCommand] | Failure) -> list[MembershipCommand | Change]:
    """The commands; a change of the roster is written as its versions and the lives of its entries."""
    assert not isinstance(commands, Failure)
    return [_brief(command) for command in commands]


def _brief(command: MembershipCommand) -> MembershipCommand | Change:
    if isinstance(command, Broadcast) and isinstance(command.message, RosterChange):
        change = command.message
        return change.since, change.version, tuple(info.life for info in change.entries)
    return command


def test_a_task_that_left_by_a_fault_is_still_coming_for_a_while() -> None:
    members = cluster()
    assert members.coming("worker", 0.0, 60.0) == (WORKER0, WORKER1)
    for peer, task in enumerate((WORKER0, WORKER1)):
        members.join(0.0, peer, Join(task, f"there:{peer}"))
    members.leave(5.0, WORKER0, membership.FINISHED)
    members.leave(6.0, WORKER1, "killed")
    assert members.coming("worker", 65.9, 60.0) == (WORKER1,)
    assert members.coming("worker", 66.0, 60.0) == ()
    members.join(70.0, 7, Join(WORKER1, "there:7"))
    assert members.coming("worker", 70.0, 60.0) == (WORKER1,)


@pytest.mark.parametrize(
    ("peer", "task", "text"),
    [
        (8, WORKER0, "worker:0 is already live at h:1, so the one at h:2 may not join"),
        (7, WORKER1, "joined as worker:0 and may not join as worker:1"),
    ],
)
def test_a_name_and_a_connection_are_of_one_live_task(peer: int, task: str, text: str) -> None:
    members = cluster()
    members.join(1.0, 7, Join(WORKER0, "h:1"))
    refusal = members.join(2.0, peer, Join(task, "h:2;unix:/folder/socket@boot/0"))
    assert isinstance(refusal, Failure)
    assert text in refusal.text
    assert members.live_peers() == (7,)


def test_a_task_is_away_from_the_end_of_its_connection_until_it_comes_back_or_has_left() -> None:
    members = cluster()
    members.join(1.0, 7, Join(WORKER0, "h:1", "x"))
    members.join(1.0, 8, Join(WORKER1, "h:2", "y"))
    members.lose(2.0, 7, "reset")
    members.lose(2.0, 8, "reset")
    assert members.away() == (WORKER0, WORKER1)
    members.join(2.5, 9, Join(WORKER0, "h:1", "x"))
    assert members.away() == (WORKER1,)
    members.tick(3.5)
    assert members.away() == ()


def test_silence_for_the_timeout_is_a_leave_and_a_heartbeat_puts_it_off() -> None:
    members = cluster()
    members.join(0.0, 7, Join(WORKER0, "h:1"))
    members.join(0.0, 8, Join(WORKER1, "h:2"))
    members.hear(5.0, WORKER1)
    assert members.tick(9.9) == []
    assert brief(members.tick(10.0)) == [
        ReleaseTask(WORKER0, 0, "no heartbeat for 10.0 s"),
        Disconnect(7, "no heartbeat for 10.0 s"),
        (2, 3, (0,)),
    ]
    assert members.live_peers() == (8,)


def test_to_be_away_puts_the_end_of_a_silent_task_not_off() -> None:
    members = cluster()
    members.join(0.0, 7, Join(WORKER0, "h:1"))
    members.lose(9.5, 7, "reset")
    assert ReleaseTask(WORKER0, 0, "reset") in members.tick(10.0)


def test_the_same_incarnation_comes_back_as_the_member_it_was_and_nobody_is_told() -> None:
    members = cluster()
    members.join(0.0, 7, Join(WORKER0, "h:1", "a"))
    before = members.roster()
    members.lose(3.0, 7, "reset")
    assert members.join(3.5, 8, Join(WORKER0, "h:1", "a")) == []
    assert members.is_live(WORKER0, 8)
    assert members.tick(13.4) == []
    assert members.roster() == before


def test_a_second_connection_of_the_same_incarnation_takes_the_place_of_the_first() -> None:
    members = cluster()
    members.join(0.0, 7, Join(WORKER0, "h:1", "a"))
    [end] = members.join(1.0, 8, Join(WORKER0, "h:1", "a"))
    assert end == Disconnect(7, "worker:0 has come over another connection")
    assert not members.is_live(WORKER0, 7)
    members.lose(1.1, 7, "closed")
    assert members.live_peers() == (8,)


def test_another_incarnation_takes_the_place_of_one_that_is_away() -> None:
    members = cluster()
    members.join(0.0, 7, Join(WORKER0, "h:1", "a"))
    members.lose(3.0, 7, "killed")
    assert brief(members.join(3.1, 8, Join(WORKER0, "h:2", "b"))) == [
        ReleaseTask(WORKER0, 0, "it was started again"),
        (1, 3, (0, 1)),
    ]
    assert [info.incarnation for info in members.roster().tasks] == ["a", "b"]
    assert members.life(WORKER0) == 1


def test_a_task_that_was_given_up_may_not_come_back_in_that_incarnation() -> None:
    members = cluster()
    members.join(0.0, 7, Join(WORKER0, "h:1", "a"))
    members.tick(10.0)
    refusal = members.join(11.0, 8, Join(WORKER0, "h:1", "a"))
    assert isinstance(refusal, Failure)
    assert refusal.kind == "TaskLost"
    assert "worker:0 left at 10.0 s: no heartbeat for 10.0 s; its work has gone to others" in refusal.text
    assert brief(members.join(12.0, 8, Join(WORKER0, "h:1", "b"))) == [(2, 3, (1,))]


def test_a_task_of_another_cluster_is_refused_with_both_names() -> None:
    members = cluster()
    members.start(0.0, "blue")
    refusal = members.join(1.0, 7, Join(WORKER0, "h:1", "a", "red"))
    assert isinstance(refusal, Failure)
    assert refusal.kind == "ConfigError"
    assert "worker:0 is a task of cluster red, and this is the coordinator of blue" in refusal.text
    assert brief(members.join(1.0, 7, Join(WORKER0, "h:1", "a", "blue"))) == [(0, 1, (0,))]


def restarted(records: DurableRecords, rows: dict[str, bytes], at_s: float) -> Membership:
    apply_changes(rows, records.take_changes())
    again = Membership(DurableRecords(rows), {"ps": 1, "worker": 2})
    again.start(at_s, "other")
    return again


def test_after_a_restart_the_members_are_those_of_before_and_have_a_while_to_come_back() -> None:
    records, rows = DurableRecords(), dict[str, bytes]()
    members = Membership(records, {"ps": 1, "worker": 2})
    members.start(0.0, "blue")
    members.join(1.0, 7, Join(WORKER0, "h:1", "a"))
    members.join(2.0, 8, Join(WORKER1, "h:2", "b"))
    members.leave(3.0, WORKER1, "finished")
    before = members.roster()
    again = restarted(records, rows, 50.0)
    assert again.roster() == Roster(before.tasks, before.expected, before.version, "blue", 2)
    assert again.live_peers() == ()
    assert again.tick(59.9) == []
    assert again.join(59.9, 7, Join(WORKER0, "h:1", "a", "blue")) == []
    assert again.tick(69.8) == []
    late = restarted(records, rows, 50.0)
    assert brief(late.tick(60.0)) == [
        ReleaseTask(WORKER0, 0, "it did not come back within 10.0 s of the coordinator's restart"),
        (3, 4, (0,)),
    ]
    assert late.roster().version == before.version + 1


def test_of_those_that_have_left_the_last_are_listed_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.distributed.coordinator.membership.MOST_LEFT", 2)
    rows: dict[str, bytes] = {}
    records = DurableRecords(rows)
    members = Membership(records, {})
    members.join(0.0, 1, Join(PS0, "h:0", "stays"))
    seen = members.roster()
    for life in range(1, 6):
        members.join(float(life), 1 + life, Join(WORKER0, "h:1", f"life {life}"))
        [_, news] = members.leave(life + 0.5, WORKER0, "reset")
        assert isinstance(news, Broadcast)
        assert isinstance(news.message, RosterChange)
        assert news.message.dropped == ((life - 2,) if life > 2 else ())
        change = members.changes_since(seen.version)
        assert change is not None
        seen = changed_roster(seen, change)
        assert seen.tasks == members.roster().tasks
    assert [info.incarnation for info in seen.tasks] == ["stays", "life 4", "life 5"]
    assert members.left_in_all == 5
    apply_changes(rows, records.take_changes())
    again = Membership(DurableRecords(rows), {})
    assert again.roster().tasks == members.roster().tasks
    assert again.left_in_all == 5
    again.join(9.0, 1, Join(WORKER1, "h:2"))
    assert again.life(WORKER1) == 6, "no number is given out twice"


def test_available_are_the_live_and_the_expected_by_index() -> None:
    members = Membership(DurableRecords(), {"ps": 11})
    members.join(0.0, 1, Join("/job:ps/task:10", "h:1"))
    members.join(0.0, 2, Join("/job:ps/task:3", "h:2"))
    members.leave(1.0, "/job:ps/task:3", "reset")
    assert members.by_job() == {"ps": tuple(f"/job:ps/task:{index}" for index in (0, 1, 2, 4, 5, 6, 7, 8, 9, 10))}


def test_changes_of_a_large_cluster_are_published_together_at_the_next_tick() -> None:
    members = Membership(DurableRecords(), {})
    tasks = [f"/job:worker/task:{index}" for index in range(PUBLISH_AT_ONCE + 3)]
    published = [len(members.join(0.0, peer, Join(task, "h"))) for peer, task in enumerate(tasks)]
    assert published == [1] * PUBLISH_AT_ONCE + [0, 0, 0]
    count = PUBLISH_AT_ONCE
    assert members.leave(0.0, tasks[0], "finished") == [ReleaseTask(tasks[0], 0, "finished")]
    assert members.roster().version == count + 4, "who joins now sees all that has happened"
    assert brief(members.tick(0.5)) == [(count, count + 4, (0, count, count + 1, count + 2))]
    assert members.tick(1.0) == []


def test_a_death_in_a_large_cluster_is_published_before_its_consequences() -> None:
    members = Membership(DurableRecords(), {})
    tasks = [f"/job:worker/task:{index}" for index in range(PUBLISH_AT_ONCE + 3)]
    for peer, task in enumerate(tasks):
        members.join(0.0, peer, Join(task, "h", f"process {peer}"))
    members.tick(0.5)
    version = members.version
    assert brief(members.leave(1.0, tasks[0], "killed"))[1:] == [(version, version + 1, (0,))]
    members.lose(1.0, 1, "killed")
    successor = members.join(1.1, 999, Join(tasks[1], "h", "another"))
    assert brief(successor)[1:] == [(version + 1, version + 3, (1, len(tasks)))]


def test_after_a_join_that_is_no_longer_listed_the_whole_roster_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MOST_LEFT", 2)
    monkeypatch.setattr(membership, "PUBLISH_AT_ONCE", -1)
    members = cluster()
    for life in range(3):
        members.join(float(life), life, Join(WORKER0, "h:1", f"life {life}"))
        members.leave(life + 0.5, WORKER0, "finished")
    assert members.tick(3.0) == [Broadcast((), members.roster())]
    assert [info.life for info in members.roster().tasks] == [1, 2]


def test_a_pause_of_the_coordinator_itself_is_no_silence_of_the_tasks() -> None:
    members = cluster()
    members.join(0.0, 7, Join(WORKER0, "h:1"))
    members.hear(7.0, WORKER0)
    members.tick(7.5)
    assert members.tick(22.0) == [], "nothing could be heard since 7.5"
    assert members.tick(22.5) == []
    assert members.tick(26.9) == []
    assert ReleaseTask(WORKER0, 0, "no heartbeat for 10.0 s") in members.tick(31.5)


def test_ticks_at_their_pace_excuse_nobody_however_short_the_time_for_heartbeats() -> None:
    members = Membership(DurableRecords(), {}, heartbeat_timeout_s=0.5)
    members.join(0.0, 7, Join(WORKER0, "h:1"))
    members.tick(0.1)
    assert members.tick(0.4) == []
    assert len(members.tick(0.9)) == 3


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "restart"]), st.integers(0, 3)), max_size=30))
@example([("leave", 0), *((act, index) for index in range(3) for act in ("join", "leave"))])
def test_the_changes_since_a_version_make_the_newest_roster_of_the_one_of_then(acts: list[tuple[str, int]]) -> None:
    rows: dict[str, bytes] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "MOST_LEFT", 2)
        records = DurableRecords(rows)
        members = Membership(records, {"worker": 3})
        rosters, peers = {}, dict[str, int]()
        for number, (act, index) in enumerate(acts):
            name = f"/job:worker/task:{index}"
            if act == "join":
                members.join(float(number), number, Join(name, "h:1", f"{number}"))
                peers.setdefault(name, number)
            elif act == "leave" and name in peers:
                peers.pop(name)
                members.leave(float(number), name, "done")
            apply_changes(rows, records.take_changes())
            if act == "restart":
                records = DurableRecords(rows)
                members = Membership(records, {"worker": 3})
                members.start(float(number), "blue")
                peers.clear()
            rosters[members.version] = members.roster()
    for version, roster in rosters.items():
        change = members.changes_since(version)
        if change is not None:
            found, newest = changed_roster(roster, change), members.roster()
            assert found.tasks == newest.tasks
            assert (found.expected, found.version, found.epoch) == (newest.expected, newest.version, newest.epoch)
    assert members.changes_since(members.version) is not None
    assert members.changes_since(members.version + 1) is None
