"""The tasks of a schedule: real `TaskServer`s and `SessionDriver`s in simulated processes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.client.session_driver import SessionDriver
from dflow.distributed.coordinator.membership import FINISHED
from dflow.distributed.snapshots.task_snapshots import TaskSnapshots
from dflow.distributed.task.task_server import TaskServer, TaskSettings, TaskStatistics
from dflow.distributed.task_role import TASK_PARTS
from dflow.distributed.transport.base import Reply
from dflow.distributed.wire.codec import Payload
from dflow.distributed.wire.messages.message import Answer, Notice, Request
from dflow.distributed.wire.messages.roster import Heartbeat, Join, Leave, Roster
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.pending_operations import HeldResource
from dflow.lowering.steps.plan import Plan
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DflowError, TaskLost
from tests.simulation.blocking_program import BlockingProgram, end_wait
from tests.simulation.checks import Checks, name_of
from tests.simulation.events import EventQueue
from tests.simulation.link import Connections, SimulatedTransport
from tests.simulation.network import Network, Process
from tests.simulation.simulated_threads import RoutineClock, SimulatedPool

#: Interval between heartbeats: longer than real ones, to have fewer events.
HEARTBEAT_S = 3.0
WAIT_S = 7.0
ASK_S = 30.0
AGAIN_S = 0.5


class Member(BlockingProgram):
    """One process as a task: its server, its session with the coordinator, and its program."""

    def __init__(self, process: Process, tasks: SimulatedTasks, on_given_up: Callable[[], None]) -> None:
        super().__init__(tasks.events, process)
        self.name = name_of(process.host)
        self.says = tasks.says
        transport = SimulatedTransport(tasks.network, process, tasks.connections)
        clock = RoutineClock(tasks.events, process)
        folder = tasks.snapshot_folder if process.host.startswith("ps:") else None
        self.server = TaskServer(
            self.name,
            transport,
            [partial(SimulatedSnapshots, self, tasks) if make is TaskSnapshots else make for make in TASK_PARTS],
            process=str(process),
            address="",
            settings=TaskSettings(wait_timeout_s=WAIT_S, snapshots=folder),
            threads=SimulatedPool(process),
            clock=clock,
        )
        self.roster = Roster((), ())
        #: The numbers of the steps that this task starts; distinct in each life.
        self.numbers = itertools.count(first := int(tasks.events.now_s * 1e6))
        self.server.channel.count_from(first)
        self._checks = tasks.checks
        self._on_given_up = on_given_up
        self._tasks = tasks
        # As in a task server: its state is worth keeping, and it has no program that would have to restart.
        settings = SessionSettings(rejoins_anew=process.host.startswith("ps:"), heartbeat_s=HEARTBEAT_S)
        self.driver = SessionDriver(
            transport,
            tasks.coordinator,
            lambda: self.driver.tell(Heartbeat(self.name)),
            name=self.name,
            process=str(process),
            settings=settings,
            clock=clock,
        )
        for part in self.server.parts:
            part.follow(self.driver)
        self.driver.call_on_roster(self._take_over)
        self.driver.call_on_lost(self._given_up)
        self.driver.open_later()

    def say(self, text: str) -> None:
        """Add a line to the log."""
        self.says(str(self.process), text)

    def start(self, work: Callable[[], None] | None = None) -> None:
        """Start the program of the process: it joins, does the work and leaves; without work, it stays."""
        super().start(partial(self._run, work))

    def _run(self, work: Callable[[], None] | None) -> None:
        self._join()
        if work is not None:
            work()
            self._leave()

    def failed(self, error: DflowError) -> None:
        """Log an error, and pause before the next try."""
        self.say(f"failed: {type(error).__name__}: {error}")
        self.sleep(AGAIN_S)

    def ask_coordinator(self, message: Request[Answer], timeout_s: float = ASK_S) -> Answer:
        """Send the coordinator a request and wait for its answer, even while it is absent."""
        what = f"the coordinator's answer to {type(message).__name__}"
        return self.wait(what, timeout_s, self.driver.start(message))

    def ask(
        self,
        host: str,
        message: Request[Answer],
        payload: Payload = b"",
        *,
        timeout_s: float,
        on_reply: Callable[[Outcome[Reply[Answer]]], None] = lambda reply: None,
    ) -> Reply[Answer]:
        """Send a request to another task and wait for its reply; `on_reply` gets the reply even if it is late."""
        future: Future[Reply[Answer]] = Future()

        def replied(reply: Outcome[Reply[Answer]]) -> None:
            if self.process.is_alive:
                on_reply(reply)
                end_wait(future, reply)

        self.server.peer(name_of(host)).start(message, payload, replied)
        return self.wait(f"the answer of {host} to {type(message).__name__}", timeout_s, future)

    def _join(self) -> None:
        """Join the cluster, retrying until it succeeds or the coordinator reports this life as lost."""
        while True:
            try:
                self.ask_coordinator(Join(self.name, self.server.address))
            except DflowError as error:
                self.say(f"could not join: {error}")
                if isinstance(error, TaskLost):
                    self._on_given_up()
                self.sleep(AGAIN_S)
            else:
                self.say("has joined")
                return

    def _leave(self) -> None:
        """Leave the cluster, and close the server."""
        try:
            self.ask_coordinator(Leave(self.name, FINISHED))
        except DflowError as error:
            self.say(f"could not say that it leaves: {error}")
        self.driver.close(FINISHED)
        self.server.close()

    def _take_over(self, roster: Roster) -> None:
        self._checks.roster(str(self.process), roster)
        self.roster = roster
        self._tasks.on_roster(self, roster)
        self.server.roster_changed(roster)

    def _given_up(self, reason: str) -> None:
        self.say(f"has no coordinator any more: {reason}")
        self._on_given_up()


class SimulatedSnapshots(TaskSnapshots):
    """Handles each notice in another program, since that may wait for a lock or the disk."""

    def __init__(self, member: Member, tasks: SimulatedTasks, server: TaskServer) -> None:
        super().__init__(server)
        self._member, self._tasks = member, tasks

    def handle(self, message: Notice) -> None:
        """Begin to handle a notice; as on a thread, a later one may be handled first."""
        program = BlockingProgram(self._tasks.events, self._member.process)

        def handle() -> None:
            if (late_s := self._tasks.network.late_start_s()) > 0:
                program.sleep(late_s)
            self._tasks.on_notice(self._member, message)
            TaskSnapshots.handle(self, message)

        program.start(handle)


class SimulatedTasks:
    """All members of a schedule."""

    def __init__(
        self,
        events: EventQueue,
        network: Network,
        checks: Checks,
        says: Callable[[str, str], None],
        coordinator: str,
        connections: Connections,
        snapshot_folder: Path | None = None,
    ) -> None:
        self.coordinator = coordinator
        #: The folder of the parts of snapshots of all ps tasks; None for none.
        self.snapshot_folder = snapshot_folder
        self.events = events
        self.network = network
        self.checks = checks
        self.says = says
        self.connections = connections
        #: Called with a task and the roster that it received, before the task's server applies it.
        self.on_roster: Callable[[Member, Roster], None] = lambda member, roster: None
        #: Called with a task and a notice about snapshots, before the task handles it.
        self.on_notice: Callable[[Member, Notice], None] = lambda member, notice: None
        self._members: dict[str, Member] = {}
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
            member.end()
            self.end(member.process)

    def statistics(self) -> Mapping[str, TaskStatistics]:
        """Return the statistics of each live task, by host."""
        return {host: member.server.statistics() for host, member in self._members.items()}

    def check(self) -> None:
        """Check that the waits of each task end, and that it remembers no more ended steps than its limit."""
        for host, member in self._members.items():
            if member.waits_until_s is not None:
                self.checks.wait(host, member.waits_for, member.waits_until_s, self.events.now_s)
            self.checks.task_waits(host, member.server.channel.endless_waits)
            self.checks.memory(host, member.server.statistics(), len(self._members))

    def member(self, host: str) -> Member | None:
        """Return the member on a host; None while its process is down."""
        return self._members.get(host)

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
                member.name: member.server.plans.add(*plans[member.process.host]) for member in members
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
        member = self.member(host)
        with contextlib.suppress(DflowError):
            return None if member is None else member.server.store.resource(name)
        return None


def programs(*functions: Callable[..., tuple[Any, ...]]) -> list[Program]:
    """Return Python functions that a plan calls as its programs."""
    # A plan calls a program with arrays and gets arrays, which plain functions do as well as XLA's programs.
    return [cast(Program, function) for function in functions]
