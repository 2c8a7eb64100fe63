"""A client's session with the coordinator, without a clock, threads or sockets."""

from __future__ import annotations

import pytest

from dflow.distributed.client.coordinator_session import (
    REJOIN,
    CoordinatorSession,
    EndLink,
    OpenLink,
    SendRequest,
    SessionCommand,
    SessionSettings,
    Settle,
    ShowRoster,
    Warn,
)
from dflow.distributed.training.work_messages import Claimed, ClaimSteps
from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.distributed.wire.messages.coordination import AwaitBarrier, Elected, ElectOnce
from dflow.distributed.wire.messages.roster import Announcement, Join, Leave, Roster, RosterChange, TaskInfo
from dflow.distributed.wire.messages.status import GetStatus

PS0, WORKER0 = "/job:ps/task:0", "/job:worker/task:0"
JOIN = Join(WORKER0, "h:0", "life")
INFO = TaskInfo(WORKER0, "h:0", 0.0, incarnation="life")
ROSTER = Roster((INFO,), (PS0,), 1, "blue", 1)
LOST = Warn(
    "the connection to the coordinator at c:1 has ended: reset; it is tried again for 600 s, and steps go on meanwhile"
)


def session(**rest: object) -> CoordinatorSession:
    return CoordinatorSession(who="the coordinator at c:1", incarnation="life", settings=SessionSettings(**rest))  # type: ignore[arg-type]


def joined(**rest: object) -> CoordinatorSession:
    """A session that is a task over the link 1."""
    made = session(**rest)
    made.opened(0.0, 1)
    assert made.ask(0.0, 1, Join(WORKER0, "h:0")) == [SendRequest(1, 1, JOIN)]
    assert made.answered(0.0, 1, 1, ROSTER) == [ShowRoster(ROSTER), Settle(1, ROSTER)]
    return made


def test_asks_wait_for_a_link_and_for_the_join() -> None:
    made = session()
    assert made.ask(0.0, 1, GetStatus()) == []
    assert made.opened(0.0, 1) == [SendRequest(1, 1, GetStatus())]
    assert made.ask(0.0, 2, Join(WORKER0, "h:0")) == [SendRequest(1, 2, JOIN)]
    assert made.ask(0.0, 3, ElectOnce("init", WORKER0)) == []
    assert made.answered(0.0, 1, 2, ROSTER) == [
        ShowRoster(ROSTER),
        Settle(2, ROSTER),
        SendRequest(1, 1, GetStatus()),
        SendRequest(1, 3, ElectOnce("init", WORKER0)),
    ]


def test_after_a_loss_the_task_comes_back_first_and_then_asks_again_in_order() -> None:
    made = joined()
    made.ask(0.0, 2, ElectOnce("a", WORKER0))
    made.ask(0.0, 3, ElectOnce("b", WORKER0))
    made.answered(0.0, 1, 2, Elected(True))
    assert made.link_ended(1.0, 1, "reset") == [LOST]
    assert made.ask(1.0, 4, GetStatus()) == []
    assert made.wake_at_s is not None
    assert made.wake(made.wake_at_s) == [OpenLink()]
    assert made.opened(2.0, 2) == [SendRequest(2, REJOIN, Join(WORKER0, "h:0", "life", "blue", 1))]
    assert made.answered(2.0, 2, REJOIN, ROSTER) == [
        Warn("the connection to the coordinator at c:1 is back after 1.0 s"),
        SendRequest(2, 3, ElectOnce("b", WORKER0)),
        SendRequest(2, 4, GetStatus()),
    ]
    assert made.answered(2.0, 1, 3, Elected(False)) == [], "an answer over a link that has ended"
    assert made.answered(2.0, 2, 3, Elected(False)) == [Settle(3, Elected(False))]


def test_a_link_over_which_a_join_is_not_answered_is_dead() -> None:
    made = session(join_s=10.0)
    made.opened(0.0, 1)
    made.ask(1.0, 1, Join(WORKER0, "h:0"))
    assert made.wake_at_s == 11.0
    assert made.wake(10.9) == []
    assert made.wake(11.0) == [EndLink(1, "a Join was not answered")]
    assert made.wake(12.0) == [OpenLink()]
    assert made.opened(12.0, 2) == [SendRequest(2, 1, JOIN)]
    assert made.wake_at_s == 22.0
    made.answered(13.0, 2, 1, ROSTER)
    assert made.wake_at_s is None


def test_an_arrival_has_its_number_and_a_claim_also_that_of_the_last_one_whose_answer_was_seen() -> None:
    made = joined()
    claim = ClaimSteps("run", WORKER0, 9, 0)
    assert made.ask(0.0, 2, claim) == [SendRequest(1, 2, ClaimSteps("run", WORKER0, 9, 2, 0))]
    made.answered(0.0, 1, 2, Claimed(0, 2))
    assert made.ask(0.0, 5, claim) == [SendRequest(1, 5, ClaimSteps("run", WORKER0, 9, 5, 2))]
    made.withdraw(0.0, 5)
    assert made.answered(0.0, 1, 5, Claimed(2, 2)) == []
    assert made.ask(0.0, 6, claim) == [SendRequest(1, 6, ClaimSteps("run", WORKER0, 9, 6, 2))]
    assert made.ask(0.0, 7, ClaimSteps("other", WORKER0, 9, 0)) == [
        SendRequest(1, 7, ClaimSteps("other", WORKER0, 9, 7, 0))
    ]
    arrival = AwaitBarrier("b", WORKER0, 8, 5.0)
    assert made.ask(0.0, 8, AwaitBarrier("b", WORKER0, 0, 5.0)) == [SendRequest(1, 8, arrival)]


def test_pauses_grow_to_the_longest_differ_by_incarnation_and_begin_anew_after_an_answer() -> None:
    def pauses(incarnation: str) -> list[float]:
        made = CoordinatorSession(who="c", incarnation=incarnation, settings=SessionSettings(0.1, 1.0))
        made.opened(0.0, 1)
        made.link_ended(0.0, 1, "reset")
        found = []
        for _ in range(8):
            assert made.wake_at_s is not None
            found.append(made.wake_at_s)
            assert made.wake(made.wake_at_s - 0.001) == []
            assert made.wake(made.wake_at_s) == [OpenLink()]
            assert made.wake_at_s is None, "one attempt at a time"
            made.open_failed(0.0, "refused")
        return found

    found = pauses("one")
    for number, pause in enumerate(found):
        longest = min(0.1 * 2**number, 1.0)
        assert longest / 2 <= pause <= longest
    assert pauses("one") == found
    assert pauses("other") != found
    made = joined(first_pause_s=0.1)
    for link in range(1, 9):
        made.link_ended(0.0, link, "reset")
        assert made.wake_at_s is not None
        assert made.wake_at_s <= 0.1, "each link was answered over"
        made.wake(1.0)
        made.opened(0.0, link + 1)
        made.answered(0.0, link + 1, REJOIN, ROSTER)


def test_a_session_gives_up_after_the_stated_time_and_says_since_when_and_why() -> None:
    made = joined(give_up_s=60.0)
    made.ask(0.0, 2, GetStatus())
    made.link_ended(10.0, 1, "reset")
    made.wake(20.0)
    assert made.open_failed(69.5, "refused") == []
    assert made.outage(69.5) == "; there is no connection to it since 59.5 s: refused"
    assert made.wake(69.9) == [OpenLink()]
    text = "the coordinator at c:1 is lost: it could not be reached for 62.0 s: refused"
    failure = Failure("TransportClosed", text)
    assert made.open_failed(72.0, "refused") == [Settle(2, failure), Warn(text, gives_up=True)]
    assert made.ended == text
    assert made.ask(73.0, 3, GetStatus()) == [Settle(3, failure)]
    assert made.opened(74.0, 2) == [EndLink(2, text)]
    assert made.wake_at_s is None


@pytest.mark.parametrize("kind", ["TaskLost", "ConfigError", "RemoteError"])
def test_a_task_that_is_not_taken_back_is_told_why(kind: str) -> None:
    made = joined()
    made.ask(0.0, 2, GetStatus())
    made.link_ended(0.0, 1, "reset")
    made.wake(1.0)
    made.opened(1.0, 2)
    text = "the coordinator at c:1 did not take this task back: it left"
    assert made.answered(1.0, 2, REJOIN, Failure(kind, "it left")) == [
        EndLink(2, text),
        Settle(2, Failure(kind, text)),
        Warn(text, gives_up=True),
    ]


def test_one_that_holds_variables_joins_anew_when_it_was_given_up_but_in_no_other_cluster() -> None:
    made = joined(rejoins_anew=True)
    made.link_ended(0.0, 1, "reset")
    made.wake(1.0)
    made.opened(1.0, 2)
    assert made.answered(1.0, 2, REJOIN, Failure("TaskLost", "it left")) == [
        SendRequest(2, REJOIN, Join(WORKER0, "h:0", "life.2", "blue", 1))
    ]
    [*_, gave_up] = made.answered(1.0, 2, REJOIN, Failure("ConfigError", "another cluster"))
    assert isinstance(gave_up, Warn)
    assert gave_up.gives_up


def warnings(commands: list[SessionCommand]) -> list[str]:
    return [command.text for command in commands if isinstance(command, Warn)]


def test_an_outage_is_announced_once_when_it_begins_and_once_when_it_ends() -> None:
    made = joined()
    assert made.link_ended(1.0, 1, "reset") == [LOST]
    said = made.wake(2.0) + made.open_failed(2.5, "refused") + made.wake(9.0)
    said += made.opened(9.5, 2) + made.link_ended(9.6, 2, "reset again")
    assert warnings(said) == []
    made.wake(20.0)
    made.opened(20.0, 3)
    back = made.answered(21.0, 3, REJOIN, ROSTER)
    assert warnings(back) == ["the connection to the coordinator at c:1 is back after 20.0 s"]
    assert warnings(made.link_ended(30.0, 3, "reset")) == [LOST.text]


def test_a_refused_join_is_the_programs_and_the_link_stays() -> None:
    made = session()
    made.opened(0.0, 1)
    made.ask(0.0, 1, Join(WORKER0, "h:0"))
    refusal = Failure("RemoteError", "already live")
    assert made.answered(0.0, 1, 1, refusal) == [Settle(1, refusal)]
    assert made.ask(0.0, 2, GetStatus()) == [SendRequest(1, 2, GetStatus())]


def test_the_end_says_leave_and_settles_what_is_open() -> None:
    made = joined()
    made.ask(0.0, 2, GetStatus())
    assert made.end("done") == [
        EndLink(1, "done", Leave(WORKER0, "done")),
        Settle(2, Failure("TransportClosed", "the connection to the coordinator at c:1 was closed: done")),
    ]
    left = joined()
    left.ask(0.0, 2, Leave(WORKER0, "finished"))
    left.answered(0.0, 1, 2, Ok())
    assert left.end("finished") == [EndLink(1, "finished")]


def test_a_change_of_the_roster_is_applied_once_and_an_older_roster_is_not_shown() -> None:
    made = joined()
    second = TaskInfo(PS0, "h:1", 1.0, life=1)
    [shown] = made.heard(0.0, 1, RosterChange(1, 2, (second,), epoch=1))
    assert shown == ShowRoster(Roster((INFO, second), (), 2, "blue", 1))
    assert made.heard(0.0, 1, RosterChange(1, 2, (second,), epoch=1)) == []
    assert made.heard(0.0, 1, ROSTER) == []
    gone = TaskInfo(WORKER0, "h:0", 0.0, 2.0, "finished", "life")
    [shown] = made.heard(0.0, 1, RosterChange(1, 4, (gone, second), epoch=1))
    assert shown == ShowRoster(Roster((gone, second), (), 4, "blue", 1))


def test_an_announcement_of_the_coordinator_is_logged() -> None:
    assert joined().heard(1.0, 1, Announcement("ps:0 is away")) == [Warn("ps:0 is away")]


def test_a_gap_in_the_changes_is_closed_by_coming_back() -> None:
    made = joined()
    end, _ = made.heard(0.0, 1, RosterChange(2, 3, (INFO,)))
    assert end == EndLink(1, "roster 1 is here, and the changes since 2 came: some were lost")
    assert made.wake(1.0) == [OpenLink()]
