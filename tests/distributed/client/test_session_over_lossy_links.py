"""Sessions of two workers and their coordinator, over links that break at any moment."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.client.coordinator_session import (
    CoordinatorSession,
    EndLink,
    GaveUp,
    OpenLink,
    SendRequest,
    SessionCommand,
    SessionSettings,
    Settle,
    ShowRoster,
    Tell,
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
from dflow.distributed.wire.messages.connection import Failure
from dflow.distributed.wire.messages.coordination import Elected, ElectOnce
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import Join
from dflow.distributed.wire.messages.rounds import Claimed, ClaimSteps
from tests.effort import examples

WORKER0, WORKER1 = "/job:worker/task:0", "/job:worker/task:1"
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
    """Two workers and a coordinator; the test decides what happens next."""

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

    def follow(self, index: int, commands: list[SessionCommand]) -> None:
        for command in commands:
            self.follow_one(index, self.workers[index], command)

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
        self.follow(index, worker.session.ask(self.now_s, worker.last_ask, message))
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
            self.follow(index, worker.session.withdraw(self.now_s, worker.ask))
            done = len([step for step in worker.claimed if step in worker.done])
            worker.ask = worker.last_ask + 1
            self.ask(index, ClaimSteps("run", worker.task, TOTAL, 0, done=done))

    # What happens from outside.

    def open(self) -> None:
        if self.opening:
            index, number = self.opening.pop(0), next(self.numbers)
            self.wires[number] = Wire(index)
            self.follow(index, self.workers[index].session.opened(self.now_s, number))

    def break_wire(self, number: int) -> None:
        wire = self.wires[number]
        if wire.is_open:
            wire.is_open = False
            wire.down.clear()
            session = self.workers[wire.worker].session
            self.follow(wire.worker, session.link_ended(self.now_s, number, "reset"))

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
            session = self.workers[wire.worker].session
            if ask == -1:
                commands = session.heard(self.now_s, number, message)
            else:
                commands = session.answered(self.now_s, number, ask, message)
            self.follow(wire.worker, commands)

    def wake(self) -> None:
        self.now_s += 3.0
        for index, worker in enumerate(self.workers):
            self.follow(index, worker.session.wake(self.now_s))

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
        assert not worker.session._asks
