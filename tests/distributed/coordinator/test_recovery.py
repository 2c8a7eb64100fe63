"""Snapshots and the return to them, as the coordinator decides them: what is committed, loaded, redone and refused."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
from dflow.distributed.coordinator.coordinator_state import CoordinatorSettings, CoordinatorState
from dflow.distributed.coordinator.recovery import CAPTURE_S, PAUSE_S, RETURN_S
from dflow.distributed.wire.messages.connection import Failure
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.pauses import HoldSteps, PauseSteps, ResumeSteps, StepsHeld
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable
from dflow.distributed.wire.messages.roster import Heartbeat, Join
from dflow.distributed.wire.messages.rounds import Claimed, ClaimSteps
from dflow.distributed.wire.messages.snapshots import (
    AwaitRecovery,
    CaptureState,
    LoadState,
    Recovered,
    SnapshotCommitted,
    StateCaptured,
    StateChanged,
    StateLoaded,
    StateRestored,
    StateWritten,
)
from tests.effort import examples

PS = ("/job:ps/task:0", "/job:ps/task:1")
WORKER = "/job:worker/task:0"
TOTAL = 60
#: Notices that the tasks of this test handle; others are about the members.
HANDLED = (CaptureState, HoldSteps, LoadState, SnapshotCommitted, StateRestored)


class Tasks:
    """Two ps tasks and a worker; a ps holds the set of the steps that it has applied, and its disk the parts.

    A task handles its notices one by one, when the test has it do so. `fresh` has the ps tasks that are empty since
    they were started again, `created` the names that have been created on each.
    """

    def __init__(self, every_s: float = 5.0) -> None:
        self.settings = CoordinatorSettings(snapshot_every_s=every_s)
        self.rows: dict[str, bytes] = {}
        self.state = CoordinatorState({"ps": 2, "worker": 1}, self.settings)
        self.now_s, self.peers, self.asks = 0.0, 0, 0
        self.peer: dict[str, int] = {}
        self.inbox: dict[str, deque[Message]] = {}
        self.answers: dict[int, Message] = {}
        self.log: list[str] = []
        self.lives = 0
        self.process: dict[str, str] = {}
        self.applied: dict[str, set[int]] = {task: set() for task in PS}
        self.disk: dict[str, dict[int, set[int]]] = {task: {} for task in PS}
        self.writing: dict[str, tuple[int, set[int]]] = {}
        self.read: dict[str, set[int]] = {}
        self.set_epoch: dict[str, int] = dict.fromkeys(PS, 0)
        self.created: dict[str, set[str]] = {task: set() for task in PS}
        self.fresh: set[str] = set()
        self.gate = 0
        for task in (*PS, WORKER):
            self.join(task)
        for index, task in enumerate(PS):
            self.place(f"v{index}", task)

    def place(self, name: str, task: str, *, is_created: bool = True) -> None:
        """Have the worker place a variable, and create it."""
        assert isinstance(self.ask(PlaceVariable(name, "float32", (), 4, "ps", on=task)), Placed)
        if is_created:
            self.created[task].add(name)

    def handle(self, event: Event) -> list[Command]:
        commands = self.state.handle(event)
        for command in commands:
            match command:
                case Persist(changes):
                    for change in changes:
                        if change.value is None:
                            self.rows.pop(change.key, None)
                        else:
                            self.rows[change.key] = change.value
                case SendReply(ask, message):
                    self.answers[ask] = message
                case Broadcast(peers, message):
                    for task, peer in self.peer.items():
                        if peer in peers and isinstance(message, HANDLED):
                            self.inbox[task].append(message)
                case Log(text):
                    self.log.append(text)
        return commands

    def join(self, task: str) -> None:
        """Have a new process of a task join."""
        self.lives += 1
        self.process[task] = f"process {self.lives}"
        self.connect(task)

    def connect(self, task: str) -> None:
        """Have the process of a task join over a new connection."""
        self.peers, self.asks = self.peers + 1, self.asks + 1
        self.inbox[task], self.peer[task] = deque(), self.peers
        self.handle(Asked(self.now_s, self.peers, self.asks, Join(task, "h:0", self.process[task])))

    def ask(self, message: Message) -> Message | None:
        """The answer of the coordinator to the worker; None if there is none yet."""
        self.asks += 1
        self.handle(Asked(self.now_s, self.peer[WORKER], self.asks, message))
        return self.answers.get(self.asks)

    def tell(self, task: str, message: Message) -> None:
        self.handle(Told(self.now_s, self.peer[task], message))

    def tick(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        for task in self.peer:
            self.tell(task, Heartbeat(task))
        self.handle(Ticked(self.now_s))

    def start_again(self, task: str) -> None:
        """Kill a ps, and start it again; its disk stays."""
        self.handle(PeerClosed(self.now_s, self.peer[task], "its process has ended"))
        self.applied[task], self.set_epoch[task] = set(), 0
        self.writing.pop(task, None)
        self.read.pop(task, None)
        self.fresh.add(task)
        self.join(task)

    def deliver(self, task: str) -> bool:
        """Have a task handle its next notice, or write what it captured; return whether there was any."""
        if task in self.writing:
            number, values = self.writing.pop(task)
            self.disk[task][number] = values
            self.tell(task, StateWritten(task, number))
            return True
        if not self.inbox[task]:
            return False
        match self.inbox[task].popleft():
            case HoldSteps(number):
                if task == WORKER:
                    self.gate = number
                if number:
                    self.tell(task, StepsHeld(task, number))
            case CaptureState(number, committed):
                self.writing[task] = number, set(self.applied[task])
                self.disk[task] = {kept: part for kept, part in self.disk[task].items() if kept == committed}
                self.tell(task, StateCaptured(task, number, tuple(sorted(self.created[task]))))
            case SnapshotCommitted(number):
                self.disk[task] = {kept: part for kept, part in self.disk[task].items() if kept >= number}
            case LoadState(number, epoch, is_set):
                self.load(task, number, epoch, is_set)
            case StateRestored():
                assert task in PS or self.applied[PS[0]] == self.applied[PS[1]]
        return True

    def load(self, task: str, number: int, epoch: int, is_set: bool) -> None:
        if epoch != self.set_epoch[task]:
            self.read.setdefault(task, set(self.disk[task][number]))
            if is_set:
                self.applied[task], self.set_epoch[task] = self.read.pop(task), epoch
                self.fresh.discard(task)
        self.tell(task, StateLoaded(task, epoch, is_set))

    def settle(self) -> None:
        """Have all tasks handle everything."""
        while sum(map(self.deliver, self.peer)):
            pass

    def snapshot(self) -> None:
        """Make the next snapshot, and commit it."""
        self.tick()
        self.settle()


def sent(tasks: Tasks, kind: type[Message]) -> set[str]:
    """The tasks that have a notice of this kind to handle."""
    return {task for task, notices in tasks.inbox.items() if any(isinstance(one, kind) for one in notices)}


def claim(tasks: Tasks, number: int, last: int = 0, done: int = 0) -> Message | None:
    return tasks.ask(ClaimSteps("run", WORKER, TOTAL, number, last, done))


def test_new_state_is_saved_at_once_and_again_after_each_interval() -> None:
    tasks = Tasks()
    tasks.snapshot()
    assert [*tasks.disk[PS[0]]] == [*tasks.disk[PS[1]]] == [1]
    tasks.tick(2.5)
    tasks.settle()
    assert [*tasks.disk[PS[0]]] == [1]
    tasks.tick(2.5)
    tasks.settle()
    assert [*tasks.disk[PS[0]]] == [*tasks.disk[PS[1]]] == [2]


def test_claims_wait_only_until_the_state_is_captured() -> None:
    tasks = Tasks()
    tasks.tick()
    for task in tasks.peer:
        tasks.deliver(task)
    assert claim(tasks, 1) is None
    ask = tasks.asks
    for task in PS:
        tasks.deliver(task)
    assert tasks.answers[ask] == Claimed(0, 15)
    assert not any(tasks.disk.values())


def test_all_tasks_return_together_and_steps_since_are_done_again() -> None:
    tasks = Tasks()
    assert claim(tasks, 1) == Claimed(0, 15)
    tasks.applied = {task: {*range(15)} for task in PS}
    assert claim(tasks, 2, 1, 15) == Claimed(15, 11)
    tasks.snapshot()
    tasks.applied = {task: {*range(26)} for task in PS}
    assert claim(tasks, 3, 2, 11) == Claimed(26, 8)
    tasks.start_again(PS[1])
    assert tasks.ask(AwaitRecovery(WORKER)) is None
    waiting = tasks.asks
    tasks.settle()
    assert tasks.answers[waiting] == Recovered(1)
    assert tasks.applied == {task: {*range(15)} for task in PS}
    assert "ps:0, ps:1 returned to snapshot 1; 11 steps are done again" in tasks.log
    assert claim(tasks, 4, 3, 0) == Claimed(15, 11)
    assert isinstance(tasks.ask(PlaceVariable("v1", "float32", (), 4, "ps")), Placed)


def test_a_task_that_is_started_again_while_it_loads_loads_once_more() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.start_again(PS[0])
    for task in (*PS, WORKER):
        tasks.deliver(task)
    assert sent(tasks, LoadState) == {*PS}
    tasks.deliver(PS[0])
    tasks.start_again(PS[0])
    assert sent(tasks, LoadState) == {*PS}
    tasks.deliver(PS[1])
    assert not sent(tasks, StateRestored)
    tasks.settle()
    assert not tasks.fresh


def test_a_task_that_dies_after_it_has_loaded_is_waited_for() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.start_again(PS[1])
    for task in (*PS, WORKER, PS[1]):
        tasks.deliver(task)
    tasks.handle(PeerClosed(tasks.now_s, tasks.peer.pop(PS[1]), "its process has ended"))
    tasks.tick(2.0)
    for _ in range(4):
        tasks.deliver(PS[0])
    assert not sent(tasks, StateRestored)
    tasks.fresh.add(PS[1])
    tasks.read.clear()
    tasks.join(PS[1])
    tasks.settle()
    assert not tasks.fresh
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(1)


def test_a_request_to_load_that_comes_again_changes_nothing_later() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.start_again(PS[1])
    for task in (*PS, WORKER, *PS, PS[0]):
        tasks.deliver(task)
    tasks.connect(PS[0])  # it has set its state, and its report may be lost
    assert sent(tasks, LoadState) >= {PS[0]}
    tasks.settle()
    assert not tasks.fresh
    assert tasks.gate == 0
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(1)


def test_a_later_snapshot_has_the_ledger_of_its_own_moment() -> None:
    tasks = Tasks()
    tasks.snapshot()
    claim(tasks, 1)
    claim(tasks, 2, 1, 15)
    tasks.now_s += 10
    tasks.snapshot()
    tasks.start_again(PS[0])
    tasks.settle()
    assert "ps:0, ps:1 returned to snapshot 2; 0 steps are done again" in tasks.log


def test_steps_that_a_worker_left_do_not_hold_back_the_return() -> None:
    tasks = Tasks()
    tasks.snapshot()
    claim(tasks, 1)
    claim(tasks, 2, 1, 5)
    assert not tasks.state._ledger.is_clear("")
    tasks.start_again(PS[1])
    tasks.settle()
    assert not tasks.fresh


def test_a_task_that_joins_again_while_it_writes_ends_the_snapshot() -> None:
    tasks = Tasks()
    tasks.tick()
    for task in (*PS, WORKER, *PS):
        tasks.deliver(task)
    tasks.writing.clear()  # its report is lost with the connection
    tasks.connect(PS[0])
    assert tasks.log[-1].endswith("ps:0 has left or joined again")
    tasks.now_s += 10
    tasks.place("late", PS[0])
    tasks.snapshot()
    assert [*tasks.disk[PS[0]]] == [2]


def test_a_variable_that_is_placed_and_not_created_is_in_no_snapshot() -> None:
    tasks = Tasks()
    tasks.place("late", PS[0], is_created=False)
    for _ in range(3):
        tasks.snapshot()
    assert tasks.state._recovery._committed is None
    assert tasks.gate == 0
    tasks.created[PS[0]].add("late")
    for _ in range(3):
        tasks.snapshot()
    known = tasks.state._recovery._committed
    assert known is not None
    assert known.names == ("v0", "v1", "late")


def test_a_task_may_write_its_part_before_another_has_captured_its_own() -> None:
    tasks = Tasks()
    tasks.tick()
    for task in (*PS, WORKER, PS[0], PS[0]):
        tasks.deliver(task)
    assert [*tasks.disk[PS[0]]] == [1]
    tasks.settle()
    assert tasks.state._recovery._committed is not None


def test_state_that_was_restored_by_the_program_is_saved_at_once() -> None:
    tasks = Tasks()
    tasks.snapshot()
    assert [*tasks.disk[PS[0]]] == [1]
    tasks.tell(WORKER, StateChanged(WORKER))
    tasks.snapshot()
    tasks.snapshot()
    assert [*tasks.disk[PS[0]]] == [2]


def test_a_worker_in_a_long_step_ends_the_attempt_at_a_snapshot() -> None:
    tasks = Tasks()
    tasks.tick()
    for task in PS:
        tasks.deliver(task)
    assert claim(tasks, 1) is None
    ask = tasks.asks
    tasks.tick(PAUSE_S + 1)
    assert f"worker:0 still runs a step after {PAUSE_S:g} s" in tasks.log[-1]
    assert tasks.answers[ask] == Claimed(0, 15)


def test_the_return_comes_before_a_save_that_cannot_begin() -> None:
    tasks = Tasks()
    tasks.snapshot()
    claim(tasks, 1)
    tasks.ask(PauseSteps(WORKER))
    tasks.start_again(PS[1])
    assert tasks.ask(AwaitRecovery(WORKER)) is None
    waiting = tasks.asks
    tasks.ask(ResumeSteps(WORKER, 1))
    tasks.settle()
    assert tasks.answers[waiting] == Recovered(1)


def test_a_claim_whose_answer_was_lost_before_the_return_gets_steps_after_it() -> None:
    tasks = Tasks()
    tasks.snapshot()
    assert claim(tasks, 1) == Claimed(0, 15)
    tasks.start_again(PS[1])
    tasks.settle()
    assert claim(tasks, 1) == Claimed(0, 15)


def test_a_part_that_cannot_be_written_leaves_the_last_snapshot_in_place() -> None:
    tasks = Tasks()
    tasks.snapshot()
    claim(tasks, 1)
    claim(tasks, 2, 1, 15)
    tasks.now_s += 10
    tasks.tick()
    for task in (*PS, WORKER, *PS):
        tasks.deliver(task)
    tasks.writing.clear()
    tasks.tell(PS[0], StateWritten(PS[0], 2, "no space left"))
    assert tasks.log[-1].endswith("and the next is due in 5 s: ps:0: no space left")
    tasks.start_again(PS[1])
    tasks.settle()
    assert "ps:0, ps:1 returned to snapshot 1; 15 steps are done again" in tasks.log


def test_a_task_that_does_not_capture_its_state_holds_up_the_steps_for_a_while_only() -> None:
    tasks = Tasks()
    tasks.tick()
    for task in tasks.peer:
        tasks.deliver(task)
    tasks.inbox[PS[1]].clear()
    assert claim(tasks, 1) is None
    ask = tasks.asks
    tasks.tick(CAPTURE_S + 1)
    assert f"ps:1 did not capture its state within {CAPTURE_S:g} s" in tasks.log[-1]
    assert tasks.answers[ask] == Claimed(0, 15)


def refusal(tasks: Tasks) -> str:
    answer = tasks.ask(AwaitRecovery(WORKER))
    assert isinstance(answer, Failure)
    assert answer.kind == "TaskLost"
    return answer.text


def test_without_snapshots_there_is_no_recovery() -> None:
    tasks = Tasks(every_s=0.0)
    for _ in range(3):
        tasks.snapshot()
    assert not any(tasks.disk.values())
    tasks.start_again(PS[0])
    assert (
        refusal(tasks)
        == "the lost state is not restored: no snapshots are made: start the cluster with --snapshots DIR"
    )


def test_state_lost_before_the_first_snapshot_stays_lost() -> None:
    tasks = Tasks()
    tasks.start_again(PS[0])
    assert refusal(tasks) == "the lost state is not restored: it was lost before the first snapshot was complete"


def test_state_that_no_snapshot_has_is_named() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.place("late", PS[1])
    tasks.start_again(PS[0])
    assert refusal(tasks) == "the lost state is not restored: snapshot 1 has no late"


def test_a_task_that_does_not_come_back_is_named() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.handle(PeerClosed(tasks.now_s, tasks.peer.pop(PS[0]), "its process has ended"))
    assert tasks.ask(AwaitRecovery(WORKER)) is None
    ask = tasks.asks
    tasks.tick(RETURN_S / 2)
    assert ask not in tasks.answers
    tasks.tick(RETURN_S)
    answer = tasks.answers[ask]
    assert isinstance(answer, Failure)
    assert answer.text == f"ps:0 did not come back within {RETURN_S:g} s"


def test_a_part_that_cannot_be_loaded_is_the_reason() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.start_again(PS[0])
    for task in (*PS, WORKER):
        tasks.deliver(task)
    tasks.applied = {task: {1} for task in PS}
    tasks.deliver(PS[1])
    tasks.tell(PS[0], StateLoaded(PS[0], 1, failure="array 'v0' is damaged"))
    assert refusal(tasks).endswith("ps:0 could not return to the snapshot: array 'v0' is damaged")
    assert tasks.applied[PS[1]] == {1}, "no task has set its state"
    tasks.inbox[PS[0]].clear()
    tasks.settle()
    assert tasks.gate == 0
    tasks.start_again(PS[0])  # with a good disk
    tasks.settle()
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(2)


def test_the_coordinator_returns_to_a_snapshot_after_its_own_restart() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.state = CoordinatorState({"ps": 2, "worker": 1}, tasks.settings, tasks.rows)
    for task in tasks.peer:
        tasks.join(task)
    tasks.settle()
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(1)


class RandomRecovery(RuleBasedStateMachine):
    """A worker that does steps, while ps tasks die at any moment, and the time of each notice is open."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = Tasks()
        self.number = self.last = self.done = 0
        self.claimed = range(0)
        self.waits_for: int | None = None
        self.is_hopeless = self.is_over = False

    def answer(self) -> Message | None:
        return None if self.waits_for is None else self.tasks.answers.get(self.waits_for)

    def work(self) -> None:
        """Do what the worker would do next."""
        if self.is_hopeless or self.is_over:
            return
        if self.waits_for is not None:
            match self.answer():
                case None:
                    return
                case Claimed(first, count):
                    self.claimed, self.done = range(first, first + count), 0
                    self.last = self.number
                    self.is_over = count == 0
                case Recovered():
                    self.claimed, self.done = range(0), 0
                case Failure(_, text):
                    assert "before the first snapshot" in text, text
                    self.is_hopeless = True
            self.waits_for = None
            return
        if self.tasks.gate:
            return
        if self.done == len(self.claimed):
            self.number += 1
            claim(self.tasks, self.number, self.last, self.done)
            self.waits_for = self.tasks.asks
            return
        step = self.claimed[self.done]
        for task in PS:
            if task in self.tasks.fresh:
                self.tasks.ask(AwaitRecovery(WORKER))
                self.waits_for = self.tasks.asks
                return
            self.tasks.applied[task].add(step)
        self.done += 1

    @rule(times=st.integers(1, 20))
    def do_steps(self, times: int) -> None:
        for _ in range(times):
            self.work()

    @rule(task=st.sampled_from([*PS, WORKER]), times=st.integers(1, 4))
    def handle_notices(self, task: str, times: int) -> None:
        for _ in range(times):
            self.tasks.deliver(task)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.tasks.tick(seconds)

    @precondition(lambda self: not self.is_over)  # a run that is over is done by no worker again
    @rule(task=st.sampled_from(PS))
    def kill(self, task: str) -> None:
        self.tasks.start_again(task)

    @precondition(lambda self: not self.is_over)
    @rule()
    def all_goes_well(self) -> None:
        self.tasks.settle()
        self.tasks.snapshot()

    @invariant()
    def no_step_runs_on_a_task_that_is_empty(self) -> None:
        assert self.is_hopeless or all(not self.tasks.applied[task] for task in self.tasks.fresh)

    def teardown(self) -> None:
        """When no task dies any more, the run ends, and each task has applied each step."""
        for _ in range(1000):
            if self.is_over or self.is_hopeless:
                break
            self.tasks.settle()
            self.tasks.tick()
            for _ in range(5):
                self.work()
        self.tasks.settle()
        assert self.is_over or self.is_hopeless
        if self.is_over and not self.tasks.fresh:
            assert self.tasks.applied == {task: {*range(TOTAL)} for task in PS}


TestRandomRecovery = RandomRecovery.TestCase
TestRandomRecovery.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
