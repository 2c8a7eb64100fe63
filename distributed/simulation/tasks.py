"""The tasks of a schedule: real `TaskServer`s in simulated processes, with plans whose programs only take note.

A step is the same for all: each ps sends a value to the worker, the worker answers each with what it made of them, and
the ps applies that. The value tells which attempt at which step it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from dflow.distributed.membership import FINISHED
from dflow.distributed.messages import AnyMessage, Heartbeat, Join, Leave, Roster
from dflow.distributed.simulation.checks import Checks, name_of
from dflow.distributed.simulation.events import EventQueue
from dflow.distributed.simulation.network import Network, Process, SimulatedTransport
from dflow.distributed.simulation.script import Script, answer, sleep
from dflow.distributed.simulation.work import SimulatedPool, deadlines_of
from dflow.distributed.task_server import TaskServer, TaskSettings, TaskStatistics
from dflow.distributed.transport.base import Peer, RefuseAll
from dflow.lowering.plan import Call, Item, Plan, Recv, Send
from dflow.lowering.program import Program
from dflow.tracing.errors import DeadlineExceeded, DflowError, TaskLost, TransportClosed

WAIT_S = 7.0
ANSWER_S = 5.0
AGAIN_S = 0.5
HEARTBEAT_S = 2.0
_PARAMETER = np.zeros((), np.int32)


class Member(RefuseAll):
    """One process as a task: its server, and its connection to the coordinator while it has one."""

    def __init__(self, process: Process, tasks: Tasks, on_given_up: Callable[[], None]) -> None:
        self.process = process
        self.name = name_of(process.host)
        self.coordinator: Peer | None = None
        self.roster = Roster((), ())
        self.says = tasks.says
        self.transport = SimulatedTransport(tasks.network, process)
        self.server = TaskServer(
            self.name,
            self.transport,
            address="",
            settings=TaskSettings(wait_timeout_s=WAIT_S),
            pool=SimulatedPool(process),
            deadlines=deadlines_of(tasks.events, process, lambda key: tasks.checks.goes_on(str(process), key)),
        )
        self._address = tasks.coordinator
        self._incarnation = str(process)
        self._events = tasks.events
        self._on_given_up = on_given_up
        self._checks = tasks.checks
        self._has_left = False

    def say(self, text: str) -> None:
        """Add a line to the log."""
        self.says(str(self.process), text)

    def membership(self) -> Script:
        """Join, tell that one is alive, and join again when the connection has ended; until it leaves."""
        while not self._has_left:
            peer = None
            try:
                peer = self.transport.connect(
                    self._address, name=self.name, handler=self, who="the coordinator", timeout_s=0.0
                )
                join = Join(self.name, self.server.address, self._incarnation, self.roster.cluster)
                self._take_over((yield answer(peer, join, ANSWER_S)))
            except DflowError as error:
                self.say(f"could not join: {error}")
                if peer is not None:
                    peer.close("could not join")
                if isinstance(error, TaskLost):
                    self._on_given_up()
                    return
                yield sleep(AGAIN_S)
                continue
            self.say("has joined")
            self.coordinator = peer
            while not peer.closed:
                peer.notify(Heartbeat(self.name))
                yield sleep(HEARTBEAT_S)
            self.coordinator = None
            self.say(f"lost the coordinator: {peer.closed}")

    def ask(self, message: AnyMessage, timeout_s: float) -> Script:
        """Ask the coordinator, again and again while it cannot be reached; the answer."""
        until_s = self._events.now_s + timeout_s
        while self._events.now_s < until_s:
            peer = self.coordinator
            if peer is None or peer.closed:
                yield sleep(AGAIN_S / 2)
                continue
            try:
                return (yield answer(peer, message, until_s - self._events.now_s))
            except TransportClosed as error:
                self.say(f"has no answer to {type(message).__name__}: {error}")
        raise DeadlineExceeded(f"waited {timeout_s:g} s for the coordinator's answer to {type(message).__name__}")

    def leave(self) -> Script:
        """Be a member no more."""
        self._has_left = True
        try:
            yield from self.ask(Leave(self.name, FINISHED), ANSWER_S)
        except DflowError as error:
            self.say(f"could not say that it leaves: {error}")
        if self.coordinator is not None:
            self.coordinator.close(FINISHED)
        self.server.close()

    def on_notify(self, peer: Peer, message: AnyMessage, payload: memoryview) -> None:
        """Take over a roster."""
        self._take_over(message)

    def _take_over(self, message: AnyMessage) -> None:
        if isinstance(message, Roster) and message.version > self.roster.version:
            self._checks.roster(str(self.process), message)
            self.roster = message
            self.server.roster_changed(message)


class Tasks:
    """All members of a schedule."""

    def __init__(
        self,
        events: EventQueue,
        network: Network,
        checks: Checks,
        says: Callable[[str, str], None],
        coordinator: str,
    ) -> None:
        self.coordinator = coordinator
        self.events = events
        self.network = network
        self.checks = checks
        self.says = says
        self._members: dict[str, Member] = {}
        self._handles: dict[tuple[Member, str], int] = {}

    def start(self, process: Process, on_given_up: Callable[[], None]) -> Member:
        """A member in a new process; `on_given_up` is called when the cluster goes on without it."""
        member = self._members[process.host] = Member(process, self, on_given_up)
        return member

    def end(self, process: Process) -> None:
        """A process is no more."""
        member = self._members[process.host]
        if member.process is process:
            del self._members[process.host]
            member.server.close()

    def close(self) -> None:
        """End all."""
        for member in list(self._members.values()):
            self.end(member.process)

    def statistics(self) -> Mapping[str, TaskStatistics]:
        """What each task holds now."""
        return {host: member.server.statistics() for host, member in self._members.items()}

    def check(self, host: str) -> None:
        """That the task there remembers no more than it may."""
        if host in self._members:
            self.checks.memory(host, self._members[host].server.statistics(), len(self._members))

    def ps_plan(self, host: str, worker: str) -> int:
        """The handle of the part that the ps has in the worker's steps, registered if need be; 0 when it is down."""
        member, destination = self._members.get(host), name_of(worker)
        if member is None:
            return 0
        if (member, worker) not in self._handles:
            edges = _edges(host)
            items: tuple[Item, ...] = (
                Call(0, (), (), (), (0,)),
                Send(edges[0], destination, 0),
                Recv(edges[1], destination, 1, "int32", ()),
                Call(1, (), (), (1,), ()),
            )
            programs = _programs(lambda: (_PARAMETER,), partial(self._apply, member))
            handle = member.server.register(Plan(member.name, 2, items), programs)
            self._handles[member, worker] = handle
        return self._handles[member, worker]

    def worker_plan(self, member: Member, ps: Sequence[str]) -> int:
        """The handle of the worker's own part over these ps tasks; its feed is the number of the attempt."""
        receives = [Recv(_edges(host)[0], name_of(host), 1 + place, "int32", ()) for place, host in enumerate(ps)]
        made = 1 + len(ps)
        items: tuple[Item, ...] = (
            *receives,
            Call(0, (), (), tuple(range(made)), (made,)),
            *(Send(_edges(host)[1], name_of(host), made) for host in ps),
        )
        plan = Plan(member.name, made + 1, items, feeds=(0,))
        return member.server.register(plan, _programs(lambda number, *values: (number,)))

    def _apply(self, member: Member, number: Any) -> tuple[()]:
        attempt = self.checks.applied(int(np.asarray(number)), member.process.host)
        member.say(f"applies step {attempt.step} of {attempt.worker}")
        return ()


def _edges(host: str) -> tuple[str, str]:
    return f"value of {host}", f"update of {host}"


def _programs(*functions: Callable[..., tuple[Any, ...]]) -> list[Program]:
    # A plan calls its programs with arrays and takes arrays; these are no programs of XLA's.
    return [cast(Program, function) for function in functions]
