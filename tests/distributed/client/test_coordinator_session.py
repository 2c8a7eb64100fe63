"""A client's session, alone and against the coordinator over links that break at any moment."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.client.coordinator_session import (
    REJOIN,
    Answered,
    Asking,
    CoordinatorSession,
    Ending,
    EndLink,
    GaveUp,
    Heard,
    LinkEnded,
    Opened,
    OpenFailed,
    OpenLink,
    SendRequest,
    SessionCommand,
    SessionEvent,
    SessionSettings,
    Settle,
    ShowRoster,
    Tell,
    Warn,
    Withdrawn,
    Woke,
)
from dflow.distributed.coordinator.coordinator_events import (
    Asked,
    Broadcast,
    Command,
    Disconnect,
    Event,
    PeerClosed,
    Persist,
    SendReply,
    Started,
    Ticked,
    Told,
)
from dflow.distributed.coordinator.coordinator_state import CoordinatorSettings, CoordinatorState
from dflow.distributed.coordinator.durable_records import apply_changes
from dflow.distributed.wire.messages.connection import Failure, Ok
from dflow.distributed.wire.messages.coordination import AwaitBarrier, Elected, ElectOnce
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import Join, Leave, Roster, RosterChange, TaskInfo
from dflow.distributed.wire.messages.rounds import Claimed, ClaimSteps
from dflow.distributed.wire.messages.status import GetStatus
from tests.effort import examples

PS0, WORKER0, WORKER1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"
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
    made.handle(Opened(0.0, 1))
    assert made.handle(Asking(0.0, 1, Join(WORKER0, "h:0"))) == [SendRequest(1, 1, JOIN)]
    assert made.handle(Answered(0.0, 1, 1, ROSTER)) == [ShowRoster(ROSTER), Settle(1, ROSTER)]
    return made


def test_asks_wait_for_a_link_and_for_the_join() -> None:
    made = session()
    assert made.handle(Asking(0.0, 1, GetStatus())) == []
    assert made.handle(Opened(0.0, 1)) == [SendRequest(1, 1, GetStatus())]
    assert made.handle(Asking(0.0, 2, Join(WORKER0, "h:0"))) == [SendRequest(1, 2, JOIN)]
    assert made.handle(Asking(0.0, 3, ElectOnce("init", WORKER0))) == []
    assert made.handle(Answered(0.0, 1, 2, ROSTER)) == [
        ShowRoster(ROSTER),
        Settle(2, ROSTER),
        SendRequest(1, 1, GetStatus()),
        SendRequest(1, 3, ElectOnce("init", WORKER0)),
    ]


def test_after_a_loss_the_task_comes_back_first_and_then_asks_again_in_order() -> None:
    made = joined()
    made.handle(Asking(0.0, 2, ElectOnce("a", WORKER0)))
    made.handle(Asking(0.0, 3, ElectOnce("b", WORKER0)))
    made.handle(Answered(0.0, 1, 2, Elected(True)))
    assert made.handle(LinkEnded(1.0, 1, "reset")) == [LOST]
    assert made.handle(Asking(1.0, 4, GetStatus())) == []
    assert made.wake_at_s is not None
    assert made.handle(Woke(made.wake_at_s)) == [OpenLink()]
    assert made.handle(Opened(2.0, 2)) == [SendRequest(2, REJOIN, Join(WORKER0, "h:0", "life", "blue", 1))]
    assert made.handle(Answered(2.0, 2, REJOIN, ROSTER)) == [
        Warn("the connection to the coordinator at c:1 is back after 1.0 s"),
        SendRequest(2, 3, ElectOnce("b", WORKER0)),
        SendRequest(2, 4, GetStatus()),
    ]
    assert made.handle(Answered(2.0, 1, 3, Elected(False))) == [], "an answer over a link that has ended"
    assert made.handle(Answered(2.0, 2, 3, Elected(False))) == [Settle(3, Elected(False))]


def test_a_join_that_was_not_answered_is_asked_again_as_the_same() -> None:
    made = session()
    made.handle(Opened(0.0, 1))
    made.handle(Asking(0.0, 1, Join(WORKER0, "h:0")))
    made.handle(LinkEnded(0.0, 1, "reset"))
    made.handle(Woke(1.0))
    assert made.handle(Opened(1.0, 2)) == [SendRequest(2, 1, JOIN)]
    assert Settle(1, ROSTER) in made.handle(Answered(1.0, 2, 1, ROSTER))


def test_a_link_over_which_a_join_is_not_answered_is_dead() -> None:
    made = session(join_s=10.0)
    made.handle(Opened(0.0, 1))
    made.handle(Asking(1.0, 1, Join(WORKER0, "h:0")))
    assert made.wake_at_s == 11.0
    assert made.handle(Woke(10.9)) == []
    assert made.handle(Woke(11.0)) == [EndLink(1, "a Join was not answered")]
    assert made.handle(Woke(12.0)) == [OpenLink()]
    assert made.handle(Opened(12.0, 2)) == [SendRequest(2, 1, JOIN)]
    assert made.wake_at_s == 22.0
    made.handle(Answered(13.0, 2, 1, ROSTER))
    assert made.wake_at_s is None


def test_a_claim_has_its_number_and_that_of_the_last_one_whose_answer_was_seen() -> None:
    made = joined()
    claim = ClaimSteps("run", WORKER0, 9, 0)
    assert made.handle(Asking(0.0, 2, claim)) == [SendRequest(1, 2, ClaimSteps("run", WORKER0, 9, 2, 0))]
    made.handle(Answered(0.0, 1, 2, Claimed(0, 2)))
    assert made.handle(Asking(0.0, 5, claim)) == [SendRequest(1, 5, ClaimSteps("run", WORKER0, 9, 5, 2))]
    made.handle(Withdrawn(0.0, 5))
    assert made.handle(Answered(0.0, 1, 5, Claimed(2, 2))) == []
    assert made.handle(Asking(0.0, 6, claim)) == [SendRequest(1, 6, ClaimSteps("run", WORKER0, 9, 6, 2))]
    assert made.handle(Asking(0.0, 7, ClaimSteps("other", WORKER0, 9, 0))) == [
        SendRequest(1, 7, ClaimSteps("other", WORKER0, 9, 7, 0))
    ]


def test_an_arrival_at_a_barrier_keeps_its_number_when_it_is_asked_again() -> None:
    made = joined()
    arrival = AwaitBarrier("b", WORKER0, 7, 5.0)
    assert made.handle(Asking(0.0, 7, AwaitBarrier("b", WORKER0, 0, 5.0))) == [SendRequest(1, 7, arrival)]
    made.handle(LinkEnded(0.0, 1, "reset"))
    made.handle(Woke(1.0))
    made.handle(Opened(1.0, 2))
    assert made.handle(Answered(1.0, 2, REJOIN, ROSTER))[1:] == [SendRequest(2, 7, arrival)]


def test_pauses_grow_to_the_longest_differ_by_incarnation_and_begin_anew_after_an_answer() -> None:
    def pauses(incarnation: str) -> list[float]:
        made = CoordinatorSession(who="c", incarnation=incarnation, settings=SessionSettings(0.1, 1.0))
        made.handle(Opened(0.0, 1))
        made.handle(LinkEnded(0.0, 1, "reset"))
        found = []
        for _ in range(8):
            assert made.wake_at_s is not None
            found.append(made.wake_at_s)
            assert made.handle(Woke(made.wake_at_s - 0.001)) == []
            assert made.handle(Woke(made.wake_at_s)) == [OpenLink()]
            assert made.wake_at_s is None, "one attempt at a time"
            made.handle(OpenFailed(0.0, "refused"))
        return found

    found = pauses("one")
    for number, pause in enumerate(found):
        longest = min(0.1 * 2**number, 1.0)
        assert longest / 2 <= pause <= longest
    assert pauses("one") == found
    assert pauses("other") != found
    made = joined(first_pause_s=0.1)
    for link in range(1, 9):
        made.handle(LinkEnded(0.0, link, "reset"))
        assert made.wake_at_s is not None
        assert made.wake_at_s <= 0.1, "each link was answered over"
        made.handle(Woke(1.0))
        made.handle(Opened(0.0, link + 1))
        made.handle(Answered(0.0, link + 1, REJOIN, ROSTER))


def test_it_gives_up_after_the_stated_time_and_says_since_when_and_why() -> None:
    made = joined(give_up_s=60.0)
    made.handle(Asking(0.0, 2, GetStatus()))
    made.handle(LinkEnded(10.0, 1, "reset"))
    made.handle(Woke(20.0))
    assert made.handle(OpenFailed(69.5, "refused")) == []
    assert made.outage(69.5) == "; there is no connection to it since 59.5 s: refused"
    assert made.handle(Woke(69.9)) == [OpenLink()]
    text = "the coordinator at c:1 is lost: it could not be reached for 62.0 s: refused"
    failure = Failure("TransportClosed", text)
    assert made.handle(OpenFailed(72.0, "refused")) == [Settle(2, failure), GaveUp(text)]
    assert made.ended == text
    assert made.handle(Asking(73.0, 3, GetStatus())) == [Settle(3, failure)]
    assert made.handle(Opened(74.0, 2)) == [EndLink(2, text)]
    assert made.wake_at_s is None


@pytest.mark.parametrize("kind", ["TaskLost", "ConfigError", "RemoteError"])
def test_one_that_is_not_taken_back_is_told_why(kind: str) -> None:
    made = joined()
    made.handle(Asking(0.0, 2, GetStatus()))
    made.handle(LinkEnded(0.0, 1, "reset"))
    made.handle(Woke(1.0))
    made.handle(Opened(1.0, 2))
    text = "the coordinator at c:1 did not take this task back: it left"
    assert made.handle(Answered(1.0, 2, REJOIN, Failure(kind, "it left"))) == [
        EndLink(2, text),
        Settle(2, Failure(kind, text)),
        GaveUp(text),
    ]


def test_one_that_holds_variables_joins_anew_when_it_was_given_up_but_in_no_other_cluster() -> None:
    made = joined(rejoins_anew=True)
    made.handle(LinkEnded(0.0, 1, "reset"))
    made.handle(Woke(1.0))
    made.handle(Opened(1.0, 2))
    assert made.handle(Answered(1.0, 2, REJOIN, Failure("TaskLost", "it left"))) == [
        SendRequest(2, REJOIN, Join(WORKER0, "h:0", "life.2", "blue", 1))
    ]
    [*_, gave_up] = made.handle(Answered(1.0, 2, REJOIN, Failure("ConfigError", "another cluster")))
    assert isinstance(gave_up, GaveUp)


def warnings(commands: list[SessionCommand]) -> list[str]:
    return [command.text for command in commands if isinstance(command, Warn)]


def test_an_outage_is_announced_once_when_it_begins_and_once_when_it_ends() -> None:
    made = joined()
    assert made.handle(LinkEnded(1.0, 1, "reset")) == [LOST]
    said = made.handle(Woke(2.0)) + made.handle(OpenFailed(2.5, "refused")) + made.handle(Woke(9.0))
    said += made.handle(Opened(9.5, 2)) + made.handle(LinkEnded(9.6, 2, "reset again"))
    assert warnings(said) == []
    made.handle(Woke(20.0))
    made.handle(Opened(20.0, 3))
    back = made.handle(Answered(21.0, 3, REJOIN, ROSTER))
    assert warnings(back) == ["the connection to the coordinator at c:1 is back after 20.0 s"]
    assert warnings(made.handle(LinkEnded(30.0, 3, "reset"))) == [LOST.text]


def test_a_tool_that_only_asks_announces_no_outage() -> None:
    made = session()
    made.handle(Opened(0.0, 1))
    said = made.handle(LinkEnded(1.0, 1, "reset")) + made.handle(Woke(2.0)) + made.handle(Opened(2.5, 2))
    assert warnings(said) == []


def test_a_refused_join_is_the_programs_and_the_link_stays() -> None:
    made = session()
    made.handle(Opened(0.0, 1))
    made.handle(Asking(0.0, 1, Join(WORKER0, "h:0")))
    refusal = Failure("RemoteError", "already live")
    assert made.handle(Answered(0.0, 1, 1, refusal)) == [Settle(1, refusal)]
    assert made.handle(Asking(0.0, 2, GetStatus())) == [SendRequest(1, 2, GetStatus())]


def test_the_end_says_leave_and_settles_what_is_open() -> None:
    made = joined()
    made.handle(Asking(0.0, 2, GetStatus()))
    assert made.handle(Ending(0.0, "done")) == [
        Tell(1, Leave(WORKER0, "done")),
        EndLink(1, "done"),
        Settle(2, Failure("TransportClosed", "the connection to the coordinator at c:1 was closed: done")),
    ]
    left = joined()
    left.handle(Asking(0.0, 2, Leave(WORKER0, "finished")))
    left.handle(Answered(0.0, 1, 2, Ok()))
    assert left.handle(Ending(0.0, "finished")) == [EndLink(1, "finished")]


def test_a_change_of_the_roster_is_applied_once_and_an_older_roster_is_not_shown() -> None:
    made = joined()
    second = TaskInfo(PS0, "h:1", 1.0, life=1)
    [shown] = made.handle(Heard(0.0, 1, RosterChange(1, 2, (second,), epoch=1)))
    assert shown == ShowRoster(Roster((INFO, second), (), 2, "blue", 1))
    assert made.handle(Heard(0.0, 1, RosterChange(1, 2, (second,), epoch=1))) == []
    assert made.handle(Heard(0.0, 1, ROSTER)) == []
    gone = TaskInfo(WORKER0, "h:0", 0.0, 2.0, "finished", "life")
    [shown] = made.handle(Heard(0.0, 1, RosterChange(1, 4, (gone, second), epoch=1)))
    assert shown == ShowRoster(Roster((gone, second), (), 4, "blue", 1))


def test_a_gap_in_the_changes_is_closed_by_coming_back() -> None:
    made = joined()
    end, _ = made.handle(Heard(0.0, 1, RosterChange(2, 3, (INFO,))))
    assert end == EndLink(1, "roster 1 is here, and the changes since 2 came: some were lost")
    assert made.handle(Woke(1.0)) == [OpenLink()]


# Sessions and a coordinator over links that break.

TOTAL = 40


@dataclass
class Worker:
    """A program that claims steps and does them, and its session."""

    task: str
    session: CoordinatorSession
    done: list[int] = field(default_factory=list)
    claimed: range = range(0)
    ask: int = 0
    last_ask: int = 0
    is_finished: bool = False
    is_elected: bool | None = None
    rosters: list[int] = field(default_factory=list)


@dataclass
class Wire:
    """One connection: what is on its way, and whether it still works."""

    worker: int
    up: deque[tuple[int, Message]] = field(default_factory=deque)
    down: deque[tuple[int, Message]] = field(default_factory=deque)
    is_open: bool = True


class LossyWorld:
    """Two workers and a coordinator; what happens next is said from outside."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rows: dict[str, bytes] = {}
        self.numbers, self.starts = itertools.count(1), itertools.count(1)
        self.wires: dict[int, Wire] = {}
        self.asks: dict[int, tuple[int, int]] = {}
        self.opening: list[int] = []
        self.start()
        self.workers = [Worker(task, self.make_session(task)) for task in (WORKER0, WORKER1)]
        for index, worker in enumerate(self.workers):
            self.opening.append(index)
            self.ask(index, Join(worker.task, "h"))
            self.ask(index, ElectOnce("init", worker.task))
            self.claim(index, 0)

    def make_session(self, task: str) -> CoordinatorSession:
        return CoordinatorSession(who="c", incarnation=f"{task} {next(self.numbers)}", settings=SessionSettings(1.0))

    def start(self) -> None:
        waits = CoordinatorSettings(heartbeat_timeout_s=1e9, rejoin_s=1e9)
        self.state = CoordinatorState({"worker": 2}, waits, self.rows)
        self.happen(Started(self.now_s, f"start {next(self.starts)}"))

    # The coordinator's side.

    def happen(self, event: Event, is_written: bool = True, is_answered: bool = True) -> None:
        for command in self.state.handle(event):
            if isinstance(command, Persist) and is_written:
                apply_changes(self.rows, command.changes)
            elif is_answered:
                self.carry_out(command)

    def carry_out(self, command: Command) -> None:
        match command:
            case SendReply(ask, message):
                wire, number = self.asks.pop(ask)
                if self.wires[wire].is_open:
                    self.wires[wire].down.append((number, message))
            case Broadcast(peers, message):
                for peer in peers:
                    if self.wires[peer].is_open:
                        self.wires[peer].down.append((-1, message))
            case Disconnect(peer, _):
                self.break_wire(peer)

    # The workers' side.

    def follow(self, index: int, event: SessionEvent) -> None:
        worker = self.workers[index]
        for command in worker.session.handle(event):
            self.follow_one(index, worker, command)

    def follow_one(self, index: int, worker: Worker, command: SessionCommand) -> None:
        match command:
            case OpenLink():
                self.opening.append(index)
            case SendRequest(link, ask, message):
                self.wires[link].up.append((ask, message))
            case Tell(link, message):
                self.wires[link].up.append((-1, message))
            case EndLink(link, _):
                self.break_wire(link)
            case ShowRoster(roster):
                worker.rosters.append(roster.version)
            case Settle(_, Elected(elected)):
                assert worker.is_elected is None
                worker.is_elected = elected
            case Settle(ask, Claimed(first, count)):
                assert ask == worker.ask, "the answer to a claim that the program no longer waits for"
                worker.ask = 0
                worker.claimed = range(first, first + count)
                worker.is_finished = not count
            case Settle(_, Failure() as failure):
                raise AssertionError(failure)
            case GaveUp(reason):
                raise AssertionError(reason)

    def ask(self, index: int, message: Message) -> int:
        worker = self.workers[index]
        worker.last_ask += 1
        self.follow(index, Asking(self.now_s, worker.last_ask, message))
        return worker.last_ask

    def claim(self, index: int, done: int) -> None:
        worker = self.workers[index]
        if not worker.is_finished and not worker.ask:
            worker.done += worker.claimed[:done]
            worker.ask = worker.last_ask + 1
            self.ask(index, ClaimSteps("run", worker.task, TOTAL, 0, done=min(done, len(worker.claimed))))

    def lose_patience(self, index: int) -> None:
        """The program's deadline for its claim passes, and it claims again."""
        worker = self.workers[index]
        if worker.ask:
            self.follow(index, Withdrawn(self.now_s, worker.ask))
            done = len([step for step in worker.claimed if step in worker.done])
            worker.ask = worker.last_ask + 1
            self.ask(index, ClaimSteps("run", worker.task, TOTAL, 0, done=done))

    # What happens from outside.

    def open(self) -> None:
        if self.opening:
            index, number = self.opening.pop(0), next(self.numbers)
            self.wires[number] = Wire(index)
            self.follow(index, Opened(self.now_s, number))

    def break_wire(self, number: int) -> None:
        wire = self.wires[number]
        if wire.is_open:
            wire.is_open = False
            wire.down.clear()
            self.follow(wire.worker, LinkEnded(self.now_s, number, "reset"))

    def deliver_up(self, number: int, fate: str = "well") -> None:
        """The next message reaches the coordinator, which may die before or after it writes."""
        wire = self.wires[number]
        if not wire.up:
            if not wire.is_open:
                del self.wires[number]
                self.happen(PeerClosed(self.now_s, number, "reset"))
            return
        ask, message = wire.up.popleft()
        if ask == -1:
            event: Event = Told(self.now_s, number, message)
        else:
            self.asks[call := next(self.numbers)] = number, ask
            event = Asked(self.now_s, number, call, message)
        self.happen(event, is_written=fate != "dies before writing", is_answered=fate == "well")
        if fate != "well":
            self.restart()

    def restart(self) -> None:
        gone, self.asks = list(self.wires), {}
        self.start()
        for number in gone:
            self.break_wire(number)
            del self.wires[number]

    def deliver_down(self, number: int) -> None:
        wire = self.wires[number]
        if wire.down:
            ask, message = wire.down.popleft()
            event = Heard(self.now_s, number, message) if ask == -1 else Answered(self.now_s, number, ask, message)
            self.follow(wire.worker, event)

    def wake(self) -> None:
        self.now_s += 3.0
        for index in range(len(self.workers)):
            self.follow(index, Woke(self.now_s))

    def flow(self) -> None:
        """All that is on its way arrives."""
        self.open()
        self.open()
        for number in list(self.wires):
            while number in self.wires and (self.wires[number].up or not self.wires[number].is_open):
                self.deliver_up(number)
            while number in self.wires and self.wires[number].down:
                self.deliver_down(number)

    def settle(self) -> None:
        """From now on nothing is lost and the programs do their steps."""
        for _ in range(400):
            self.wake()
            self.flow()
            self.happen(Ticked(self.now_s))
            for index in range(len(self.workers)):
                self.claim(index, TOTAL)


DELIVERIES = ("up", "up", "up", "down", "down", "flow")
FAULTS = ("break", "patience", "kill", "dies before writing", "dies after writing")
ACTS = st.lists(
    st.tuples(
        st.sampled_from([*DELIVERIES, *FAULTS, "open", "wake", "claim", "claim"]),
        st.integers(0, 5),
    ),
    max_size=120,
)


@settings(max_examples=examples(300), deadline=None)
@given(ACTS, st.booleans())
def test_each_step_is_done_once_whatever_is_lost_asked_again_and_restarted(
    acts: list[tuple[str, int]], is_under_way: bool
) -> None:
    world = LossyWorld()
    if is_under_way:
        for _ in range(3):
            world.flow()
    for what, choice in acts:
        wires = list(world.wires)
        number = wires[choice % len(wires)] if wires else None
        match what:
            case "open":
                world.open()
            case "flow":
                world.flow()
            case "wake":
                world.wake()
            case "claim":
                world.claim(choice % 2, choice)
            case "patience":
                world.lose_patience(choice % 2)
            case "kill":
                world.restart()
            case "up" | "dies before writing" | "dies after writing" if number is not None:
                world.deliver_up(number, "well" if what == "up" else what)
            case "down" if number is not None:
                world.deliver_down(number)
            case "break" if number is not None:
                world.break_wire(number)
    world.settle()
    assert [worker.is_finished for worker in world.workers] == [True, True]
    assert sorted(step for worker in world.workers for step in worker.done) == list(range(TOTAL))
    status = world.state.status(world.now_s)
    assert status.steps_done == TOTAL == sum(worker.steps for worker in status.workers)
    assert sorted(worker.is_elected or False for worker in world.workers) == [False, True]
    assert [info.left for info in status.tasks] == ["", ""], "none was taken for another, or for one that left"
    for worker in world.workers:
        assert worker.rosters == sorted(set(worker.rosters))
        assert worker.session.roster.tasks == status.tasks
        assert worker.session.open_asks == 0
