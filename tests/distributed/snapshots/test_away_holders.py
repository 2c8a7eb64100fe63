"""Holders, whose state other tasks need: each is away when it is silent, and leaves only after its own timeout."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.coordinator.coordinator_events import Log
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.membership import Membership, MembershipCommand, ReleaseTask
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.roster import Join
from tests.distributed.coordinator.test_membership import PS0, WORKER0, brief, cluster, restarted
from tests.effort import examples


def holds(task: str) -> bool:
    return task == PS0


def ticked(members: Membership, from_s: float, to_s: float) -> list[MembershipCommand]:
    ticks = range(int(2 * from_s) + 1, int(2 * to_s) + 1)
    return [command for tick in ticks for command in members.tick(tick / 2, holds)]


def with_a_silent_holder() -> Membership:
    """A holder and a worker that joined at 0 s; only the worker was heard since, at 5 s."""
    members = cluster()
    members.join(0.0, 7, Join(PS0, "h:1", "p"))
    members.join(0.0, 8, Join(WORKER0, "h:2", "w"))
    members.hear(5.0, WORKER0)
    return members


def test_a_pause_of_the_coordinator_does_not_shorten_the_timeout_of_a_holder() -> None:
    members = with_a_silent_holder()
    assert len(ticked(members, 5.0, 10.0)) == 2
    assert members.tick(40.0, holds) == [], "nothing could be heard for 30 s"
    ticked(members, 40.0, 89.5)
    assert members.is_there(PS0)
    ticked(members, 89.5, 90.0)
    assert not members.is_there(PS0)


def test_the_reason_of_an_absence_stays_when_the_connection_ends_too() -> None:
    members = with_a_silent_holder()
    ticked(members, 5.0, 10.0)
    members.lose(10.2, 7, "reset")
    ticked(members, 10.2, 59.5)
    assert brief(ticked(members, 59.5, 60.0))[0] == ReleaseTask(
        PS0, 0, "no heartbeat for 10.0 s, and 60 s without a sign of life"
    )


def test_after_a_restart_of_the_coordinator_a_holder_has_its_whole_timeout() -> None:
    records, rows = DurableRecords(), dict[str, bytes]()
    members = Membership(records, {})
    members.start(0.0, "blue")
    members.join(1.0, 7, Join(PS0, "h:1", "p"))
    again = restarted(records, rows, 50.0)
    assert len(ticked(again, 50.0, 60.0)) == 2
    assert ticked(again, 60.0, 109.5) == []
    assert brief(again.tick(110.0, holds))[0] == ReleaseTask(
        PS0, 0, "it did not come back within 10.0 s of the coordinator's restart, and 60 s without a sign of life"
    )


#: Events of one holder: a heartbeat, the end of its connection, a join of its process or of another; or time alone.
HOLDER_EVENTS = st.lists(
    st.tuples(st.sampled_from(["hear", "lose", "rejoin", "replace", "tick"]), st.sampled_from([0.5, 3.0, 12.0, 45.0])),
    max_size=30,
)


@settings(max_examples=examples(300))
@given(HOLDER_EVENTS)
def test_a_holder_leaves_by_its_own_timeout_or_when_another_process_replaces_it(
    events: list[tuple[str, float]],
) -> None:
    members = Membership(DurableRecords(), {})
    members.join(0.0, 1, Join(WORKER0, "h:2", "w"))
    members.join(0.0, 2, Join(PS0, "h:1", "p0"))
    at_s, heard_at_s, process, peer, is_away = 0.0, 0.0, 0, 2, False
    for event, pause_s in events:
        for _ in range(int(pause_s / 0.5)):
            at_s += 0.5
            members.hear(at_s, WORKER0)
            found = members.tick(at_s, holds)
            announced = [command for command in found if isinstance(command, Log)]
            released = [command for command in found if isinstance(command, ReleaseTask)]
            assert len(announced) <= (not is_away)
            is_away |= bool(announced)
            assert bool(released) == (members.is_there(PS0) is False)
            if released:
                assert is_away
                assert at_s - heard_at_s >= 60.0
                return
            assert at_s - heard_at_s < 60.0
            assert is_away == (at_s - heard_at_s >= 10.0) or not members.is_live(PS0, peer)
        life, is_connected = members.life(PS0), members.is_live(PS0, peer)
        commands: Iterable[MembershipCommand] | Failure = ()
        match event:
            case "hear" if is_connected:
                commands = members.hear(at_s, PS0)
            case "lose":
                members.lose(at_s, peer, "reset")
                continue
            case "rejoin" if not is_connected:
                peer += 1
                commands = members.join(at_s, peer, Join(PS0, "h:1", f"p{process}"))
            case "replace" if not is_connected:
                peer, process = peer + 1, process + 1
                commands = members.join(at_s, peer, Join(PS0, "h:1", f"p{process}"))
                assert members.life(PS0) == life + 1
                is_away, heard_at_s = False, at_s
                continue
            case _:
                continue
        assert not isinstance(commands, Failure)
        assert len([command for command in commands if isinstance(command, Log)]) == is_away
        assert members.life(PS0) == life
        is_away, heard_at_s = False, at_s
