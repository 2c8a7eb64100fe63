"""The tasks of a schedule: real `TaskServer`s in simulated processes, whose plans have programs that only record calls.

All steps are alike: each ps sends a value to the worker, the worker sends an update to each ps, and each ps applies it.
The update is the number of the attempt, which identifies the step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.coordinator.membership import FINISHED
from dflow.distributed.simulation.checks import Checks, name_of
from dflow.distributed.simulation.client import Client
from dflow.distributed.simulation.events import EventQueue
from dflow.distributed.simulation.link import Connections, SimulatedTransport
from dflow.distributed.simulation.network import Network, Process
from dflow.distributed.simulation.script import Resolve, Script, Wait, sleep
from dflow.distributed.simulation.work import SimulatedPool, deadlines_of
from dflow.distributed.task.task_server import TaskServer, TaskSettings, TaskStatistics
from dflow.distributed.transport.base import Reply
from dflow.distributed.wire.codec import Payload
from dflow.distributed.wire.messages.message import Answer, Request
from dflow.distributed.wire.messages.roster import Join, Leave, Roster
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.resource_rules import HeldResource
from dflow.lowering.steps.plan import Call, Item, Plan, Recv, Send
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DflowError, TaskLost

WAIT_S = 7.0
ASK_S = 30.0
AGAIN_S = 0.5
_PARAMETER = np.zeros((), np.int32)


class Member:
    """One process as a task: its server, and its client of the coordinator."""

    def __init__(self, process: Process, tasks: Tasks, on_given_up: Callable[[], None]) -> None:
        self.process = process
        self.name = name_of(process.host)
        self.says = tasks.says
        transport = SimulatedTransport(tasks.network, process, tasks.connections)
        self.server = TaskServer(
            self.name,
            transport,
            process=str(process),
            address="",
            settings=TaskSettings(wait_timeout_s=WAIT_S),
            pool=SimulatedPool(process),
            deadlines=deadlines_of(tasks.events, process, lambda key: tasks.checks.goes_on(str(process), key)),
        )
        self.roster = Roster((), ())
        #: The numbers of the steps that this task starts; distinct in each life.
        self.numbers = itertools.count(first := int(tasks.events.now_s * 1e6))
        self.server.channel.count_from(first)
        self._checks = tasks.checks
        self._on_given_up = on_given_up
        self._tasks = tasks
        # As in a task server: its state is worth keeping, and it has no program that would have to restart.
        settings = SessionSettings(rejoins_anew=process.host.startswith("ps:"))
        self.coordinator = Client(
            tasks.events,
            process,
            transport,
            tasks.coordinator,
            self.name,
            settings,
            self._take_over,
            self._given_up,
        )

    def say(self, text: str) -> None:
        """Add a line to the log."""
        self.says(str(self.process), text)

    def task_on(self, host: str) -> str:
        """Return the name of the task on a host."""
        return name_of(host)

    def ask(
        self,
        host: str,
        message: Request[Answer],
        payload: Payload = b"",
        *,
        timeout_s: float,
        on_reply: Callable[[Outcome[Reply[Answer]]], None] = lambda reply: None,
    ) -> Wait:
        """Send a request to another task and wait for its reply; `on_reply` gets the reply even if it is late."""

        def start(resolve: Resolve) -> None:
            def replied(reply: Outcome[Reply[Answer]]) -> None:
                if self.process.is_alive:
                    on_reply(reply)
                    resolve(reply)

            self.server.peer(name_of(host)).start(message, payload, replied)

        return Wait(f"the answer of {host} to {type(message).__name__}", timeout_s, start)

    def join(self) -> Script:
        """Join the cluster, retrying until it succeeds or the coordinator reports this life as lost."""
        while True:
            try:
                yield self.coordinator.ask(Join(self.name, self.server.address), ASK_S)
            except DflowError as error:
                self.say(f"could not join: {error}")
                if isinstance(error, TaskLost):
                    self._on_given_up()
                    return
                yield sleep(AGAIN_S)
            else:
                self.say("has joined")
                return

    def leave(self) -> Script:
        """Leave the cluster, and close the server."""
        try:
            yield self.coordinator.ask(Leave(self.name, FINISHED), ASK_S)
        except DflowError as error:
            self.say(f"could not say that it leaves: {error}")
        self.coordinator.end(FINISHED)
        self.server.close()

    def _take_over(self, roster: Roster) -> None:
        self._checks.roster(str(self.process), roster)
        self.roster = roster
        self._tasks.on_roster(self, roster)
        self.server.roster_changed(roster)

    def _given_up(self, reason: str) -> None:
        self.say(f"has no coordinator any more: {reason}")
        self._on_given_up()


class Tasks:
    """All members of a schedule."""

    def __init__(
        self,
        events: EventQueue,
        network: Network,
        checks: Checks,
        says: Callable[[str, str], None],
        coordinator: str,
        connections: Connections,
    ) -> None:
        self.coordinator = coordinator
        self.events = events
        self.network = network
        self.checks = checks
        self.says = says
        self.connections = connections
        #: Called with a task and the roster that it received, before the task's server applies it.
        self.on_roster: Callable[[Member, Roster], None] = lambda member, roster: None
        self._members: dict[str, Member] = {}
        self._handles: dict[tuple[Member, str], int] = {}
        self._runs: dict[tuple[str, tuple[Member, ...]], dict[str, int]] = {}

    def start(self, process: Process, on_given_up: Callable[[], None]) -> Member:
        """Start a member in a new process; `on_given_up` is called when the cluster goes on without it."""
        member = self._members[process.host] = Member(process, self, on_given_up)
        return member

    def end(self, process: Process) -> None:
        """Remove the member of a process that has ended."""
        member = self._members[process.host]
        if member.process is process:
            del self._members[process.host]
            member.server.close()

    def close(self) -> None:
        """End all members."""
        for member in list(self._members.values()):
            self.end(member.process)

    def statistics(self) -> Mapping[str, TaskStatistics]:
        """Return the statistics of each live task, by host."""
        return {host: member.server.statistics() for host, member in self._members.items()}

    def check(self) -> None:
        """Check that no task remembers more ended steps than its limit."""
        for host, found in self.statistics().items():
            self.checks.memory(host, found, len(self._members))

    def ps_plan(self, host: str, worker: str) -> int:
        """Return the handle of the ps's plan in the worker's steps, registered at first use; 0 if the ps is down."""
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
            both = programs(lambda: (_PARAMETER,), partial(self._apply, member))
            handle = member.server.register(Plan(member.name, 2, items), both)
            self._handles[member, worker] = handle
        return self._handles[member, worker]

    def handles(
        self, run: str, hosts: Sequence[str], made: Callable[[], Mapping[str, tuple[Plan, list[Program]]]]
    ) -> Mapping[str, int]:
        """Return the handles of the plans of a run, by task; at first use, make them by `made` and register them.

        raises  TaskLost when one of the hosts is down
        """
        members = tuple(self._members[host] for host in hosts if host in self._members)
        if len(members) < len(hosts):
            raise TaskLost(f"one of {', '.join(hosts)} is down")
        if (run, members) not in self._runs:
            plans = made()
            self._runs[run, members] = {
                member.name: member.server.register(*plans[member.process.host]) for member in members
            }
        return self._runs[run, members]

    def live_workers(self, member: Member) -> tuple[str, ...]:
        """Return the workers in the cluster by the member's last roster."""
        return tuple(
            info.task for info in member.roster.tasks if info.left_at_s is None and "/job:worker/" in info.task
        )

    def life_of(self, host: str) -> int:
        """Return the number of the present life of the host's process."""
        return self.network.process(host).life

    def resource(self, host: str, name: str) -> HeldResource | None:
        """Return the queue or accumulator of this name on a host, or None."""
        member = self._members.get(host)
        with contextlib.suppress(DflowError):
            return None if member is None else member.server.store.resource(name)
        return None

    def worker_plan(self, member: Member, ps: Sequence[str]) -> int:
        """Register the worker's plan over these ps tasks and return its handle; its feed is the attempt's number."""
        receives = [Recv(_edges(host)[0], name_of(host), 1 + place, "int32", ()) for place, host in enumerate(ps)]
        made = 1 + len(ps)
        items: tuple[Item, ...] = (
            *receives,
            Call(0, (), (), tuple(range(made)), (made,)),
            *(Send(_edges(host)[1], name_of(host), made) for host in ps),
        )
        plan = Plan(member.name, made + 1, items, feeds=(0,))
        return member.server.register(plan, programs(lambda number, *values: (number,)))

    def _apply(self, member: Member, number: Any) -> tuple[()]:
        attempt = self.checks.applied(int(np.asarray(number)), member.process.host)
        member.say(f"applies step {attempt.step} of {attempt.worker}")
        return ()


def _edges(host: str) -> tuple[str, str]:
    return f"value of {host}", f"update of {host}"


def programs(*functions: Callable[..., tuple[Any, ...]]) -> list[Program]:
    """Return Python functions that a plan calls as its programs."""
    # A plan calls a program with arrays and gets arrays, which plain functions do as well as XLA's programs.
    return [cast(Program, function) for function in functions]
