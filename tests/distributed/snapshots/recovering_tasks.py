"""Tasks of a cluster with snapshots, as tests of the coordinator's state have them: they hold sets of applied steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from dflow.distributed.coordinator.coordinator_events import (
    Asked,
    Broadcast,
    Command,
    Event,
    Log,
    PeerClosed,
    Persist,
    SendReply,
    Started,
    Ticked,
    Told,
)
from dflow.distributed.coordinator.coordinator_part import CoordinatorSettings
from dflow.distributed.coordinator.membership import STOPPED
from dflow.distributed.coordinator_role import make_coordinator_state
from dflow.distributed.snapshots.pause_messages import HoldSteps, StepsHeld
from dflow.distributed.snapshots.snapshot_messages import (
    CaptureState,
    LoadState,
    SnapshotCommitted,
    StateCaptured,
    StateLoaded,
    StateRestored,
    StateWritten,
)
from dflow.distributed.training.work_messages import ClaimSteps
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.message import Mark, Marked, Message
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable
from dflow.distributed.wire.messages.roster import Heartbeat, Join, Leave, Roster

PS = ("/job:ps/task:0", "/job:ps/task:1")
WORKER = "/job:worker/task:0"
JOBS = {"ps": 2, "worker": 1}
TOTAL = 60
#: Notices that the tasks of this test handle; others are about the members.
HANDLED = (CaptureState, HoldSteps, LoadState, SnapshotCommitted, StateRestored)


class Tasks:
    """Two ps tasks and a worker; a ps holds the set of the steps that it has applied, and its disk the parts.

    A task handles its notices one by one, when the test has it do so. `fresh` has the ps tasks that are empty since
    they were started again, `created` the names that have been created on each, `freed` the names that a return has
    freed, with their task.
    """

    def __init__(self, every_s: float = 5.0) -> None:
        self.settings = CoordinatorSettings(snapshot_every_s=every_s)
        self.rows: dict[str, bytes] = {}
        self.now_s, self.peers, self.asks = 0.0, 0, 0
        self.peer: dict[str, int] = {}
        self.inbox: dict[str, deque[Message]] = {}
        self.answers: dict[int, Message] = {}
        self.log: list[str] = []
        #: By task, what its heartbeats say that it works on.
        self.doing: dict[str, str] = {}
        self.lives = 0
        self.process: dict[str, str] = {}
        #: By request to join, the process; by process, the cluster that it has joined.
        self.joins: dict[int, str] = {}
        self.known: dict[str, str] = {}
        self.applied: dict[str, set[int]] = {task: set() for task in PS}
        self.disk: dict[str, dict[int, set[int]]] = {task: {} for task in PS}
        self.writing: dict[str, tuple[int, set[int]]] = {}
        self.read: dict[str, set[int]] = {}
        self.set_epoch: dict[str, int] = dict.fromkeys(PS, 0)
        self.created: dict[str, set[str]] = {task: set() for task in PS}
        self.fresh: set[str] = set()
        self.freed: dict[str, str] = {}
        self.gate = 0
        self.start_coordinator()
        for task in (*PS, WORKER):
            self.join(task)
        for index, task in enumerate(PS):
            self.place(f"v{index}", task)

    def start_coordinator(self, jobs: Mapping[str, int] = JOBS) -> None:
        """Start the coordinator, or start it again with its records."""
        self.state = make_coordinator_state(jobs, self.settings, dict(self.rows))
        self.handle(Started(self.now_s, f"cluster {self.asks}"))

    def place(self, name: str, task: str, *, is_created: bool = True) -> None:
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
                    if isinstance(message, Roster):
                        self.known[self.joins[ask]] = message.cluster
                    is_marked = isinstance(message, Marked)
                    self.answers[ask] = msgspec.structs.replace(message, mark=Mark()) if is_marked else message
                case Broadcast(peers, message):
                    for task, peer in self.peer.items():
                        if peer in peers and isinstance(message, HANDLED):
                            self.inbox[task].append(message)
                case Log(text):
                    self.log.append(text)
        return commands

    def join(self, task: str) -> None:
        self.lives += 1
        self.process[task] = f"process {self.lives}"
        self.connect(task)

    def connect(self, task: str) -> None:
        """Have the process of a task join over a new connection; a process that has joined before knows its cluster."""
        self.peers, self.asks = self.peers + 1, self.asks + 1
        self.inbox[task], self.peer[task] = deque(), self.peers
        self.joins[self.asks] = self.process[task]
        message = Join(task, "h:0", self.process[task], self.known.get(self.process[task], ""))
        self.handle(Asked(self.now_s, self.peers, self.asks, message))

    def ask(self, message: Message, task: str = WORKER) -> Message | None:
        """The answer of the coordinator to a task; None if there is none yet."""
        self.asks += 1
        self.handle(Asked(self.now_s, self.peer[task], self.asks, message))
        return self.answers.get(self.asks)

    def waiting(self, message: Message, task: str = WORKER) -> int:
        assert self.ask(message, task) is None
        return self.asks

    def refusal(self, ask: int) -> str:
        answer = self.answers[ask]
        assert isinstance(answer, Failure)
        assert answer.kind == "TaskLost"
        return answer.text

    def each(self, *tasks: str) -> None:
        for task in tasks:
            self.deliver(task)

    def tell(self, task: str, message: Message) -> None:
        self.handle(Told(self.now_s, self.peer[task], message))

    def tick(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        for task in self.peer:
            self.tell(task, Heartbeat(task, doing=self.doing.get(task, "")))
        self.handle(Ticked(self.now_s))

    def start_again(self, task: str) -> None:
        """Kill a ps, and start it again; its disk stays."""
        self.handle(PeerClosed(self.now_s, self.peer[task], "its process has ended"))
        self.applied[task], self.set_epoch[task] = set(), 0
        self.writing.pop(task, None)
        self.read.pop(task, None)
        self.fresh.add(task)
        self.join(task)

    def stop(self, task: str) -> None:
        self.tell(task, Leave(task, STOPPED))
        del self.peer[task]
        self.applied[task], self.set_epoch[task] = set(), 0
        self.writing.pop(task, None)
        self.read.pop(task, None)
        self.fresh.add(task)

    def end_all(self, jobs: Mapping[str, int] = JOBS) -> None:
        """Kill the coordinator and all tasks, and start the coordinator again."""
        for task in PS:
            self.applied[task], self.set_epoch[task], self.created[task] = set(), 0, set()
            self.fresh.add(task)
        self.writing.clear()
        self.read.clear()
        self.inbox.clear()
        self.peer.clear()
        self.gate = 0
        self.start_coordinator(jobs)

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
            case SnapshotCommitted(number) if task in self.disk:
                self.disk[task] = {kept: part for kept, part in self.disk[task].items() if kept >= number}
            case LoadState() as message:
                self.load(task, message)
            case StateRestored():
                # A task may have died after the return that this notice, still on its way, is about.
                assert task in PS or self.fresh or self.applied[PS[0]] == self.applied[PS[1]]
                self.make_again(task)
        return True

    def load(self, task: str, message: LoadState) -> None:
        epoch = message.epoch
        if epoch != self.set_epoch[task]:
            part = set() if task in message.without else self.disk[task][message.number]
            self.read.setdefault(task, set(part))
            if message.is_set:
                self.applied[task], self.set_epoch[task] = self.read.pop(task), epoch
                self.fresh.discard(task)
                self.freed |= dict.fromkeys(self.created[task].intersection(message.unsaved), task)
                self.created[task].difference_update(message.unsaved)
        self.tell(task, StateLoaded(task, epoch, message.is_set))

    def make_again(self, task: str) -> None:
        freed, self.freed = (self.freed, {}) if task == WORKER else ({}, self.freed)
        for name, holder in freed.items():
            self.place(name, holder)

    def settle(self) -> None:
        while sum(map(self.deliver, self.peer)):
            pass

    def settle_all_but(self, *silent: str) -> None:
        while sum(self.deliver(task) for task in self.peer if task not in silent):
            pass

    def snapshot(self) -> None:
        self.tick()
        self.settle()


def sent(tasks: Tasks, kind: type[Message]) -> set[str]:
    return {task for task, notices in tasks.inbox.items() if any(isinstance(one, kind) for one in notices)}


def claim(tasks: Tasks, number: int, last: int = 0, done: int = 0) -> Message | None:
    return tasks.ask(ClaimSteps("run", WORKER, TOTAL, number, last, done))
