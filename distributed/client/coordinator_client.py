"""A client of the coordinator, for tasks, workers and tools. A request is its message: `client.ask(GetStatus())`.

`session_driver` transmits the messages, and has the roster. Invariants:
- every request has a deadline, and waits until then even while the coordinator is away;
- `roster` is the newest one that the coordinator sent, as soon as `join` has returned;
- heartbeats are sent from `join` to `leave` or `close` while there is a connection, whatever the program does.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Iterable

from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.client.session_driver import SessionDriver
from dflow.distributed.coordinator.membership import FINISHED, STOPPED
from dflow.distributed.coordinator.progress_watch import describe_task
from dflow.distributed.coordinator.task_totals import largest
from dflow.distributed.transport.base import Transport
from dflow.distributed.transport.link import on_reader_thread
from dflow.distributed.wire.messages.coordination import AwaitBarrier, DecideOnce, ElectOnce
from dflow.distributed.wire.messages.message import Answer, Message, Request
from dflow.distributed.wire.messages.observing import DumpEvents
from dflow.distributed.wire.messages.roster import EdgeTraffic, Heartbeat, Join, Leave, Roster
from dflow.distributed.wire.messages.status import GetHealth
from dflow.lowering.queues.timers import Clock, Timers
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, InternalError

#: Deadline of a call that the coordinator answers immediately, in s.
ANSWER_S = 30.0
#: Deadline of a question on which a worker cannot go on alone, through a restart of the coordinator, in s.
AGREE_S = 600.0
#: The coordinator enforces a barrier's timeout; the client waits this much longer for its answer.
BARRIER_GRACE_S = 5.0
#: Longest wait of a stopping process for the coordinator to confirm that it leaves, in s.
LEAVE_S = 1.0
#: Deadline of the health request that adds detail to an error, in s.
DESCRIBE_S = 1.0
#: The clients of this process.
_clients: weakref.WeakSet[CoordinatorClient] = weakref.WeakSet()


def leave_all() -> None:
    """Close all clients of this process, also while another thread joins by one; their tasks leave as stopped."""
    for client in list(_clients):
        client.leave(STOPPED, timeout_s=LEAVE_S)


class CoordinatorClient:
    """A connection to the coordinator at `address`, as `name`, opened by the constructor.

    timeout_s  longest wait for the first connection
    raises     what `SessionDriver.open` raises; see `SessionDriver` for the other arguments
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        *,
        name: str,
        timeout_s: float = ANSWER_S,
        settings: SessionSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        #: The task that has joined; empty before.
        self.task = ""
        self._heartbeat: Callable[[], Heartbeat] = lambda: Heartbeat(self.task)
        #: Clock of the session's timeouts and heartbeats.
        self.clock = clock or Timers("dflow coordinator link")
        self.session = SessionDriver(
            transport,
            address,
            self._beat,
            name=name,
            process=secrets.token_hex(8),
            settings=settings or SessionSettings(),
            clock=self.clock,
        )
        #: Send the coordinator a notification; does not wait, and is dropped before `join` and during an outage.
        self.tell = self.session.tell
        _clients.add(self)
        self.session.open(timeout_s)

    # Being a task.

    def join(
        self,
        task: str,
        address: str,
        *,
        traffic: Callable[[], tuple[EdgeTraffic, ...]] = tuple,
        steps: Callable[[], int] = int,
        doing: Callable[[], str] = str,
        used: Callable[[], tuple[float, int]] = lambda: (0.0, 0),
        timeout_s: float = ANSWER_S,
    ) -> Roster:
        """Join as the task `task`, which listens at `address`, and start the heartbeats.

        The callables are called before each heartbeat, which carries their results:
        `traffic`  what the task has sent since it started
        `steps`    number of parts of steps that it has ended
        `doing`    short text on what it works on, empty when idle; a task that is busy and ends no part has stalled
        `used`     processor time of this process, in s, and number of its wake-ups
        raises     RemoteError with both addresses when a live task has the name; DeviceError for a malformed name
        """
        self.task = task
        self._heartbeat = lambda: Heartbeat(task, largest(traffic()), steps(), doing(), *used())
        try:
            self.session.ask(Join(task, address), timeout_s)
        except BaseException:
            self.task = ""
            raise
        return self.session.roster

    def leave(self, reason: str = FINISHED, *, timeout_s: float = 5.0) -> None:
        """Send a last heartbeat, leave the cluster and close; does not raise when the coordinator has gone.

        Waits at most `timeout_s` for a coordinator that is away, which would otherwise declare this task dead.
        """
        if self.task and not self.session.is_closed:
            self._beat()
            with contextlib.suppress(DflowError):
                self.session.ask(Leave(self.task, reason), timeout_s)
        self.close(reason)

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection for good; a task that has joined then leaves with a fault. A second call does nothing."""
        self.session.close(reason)

    # Requests.

    def ask(self, message: Request[Answer], timeout_s: float | None = None) -> Answer:
        """Send the coordinator a request, and return its answer.

        timeout_s  longest wait, by default that of the request: for a barrier, its own timeout
        raises     what `SessionDriver.ask` raises; InternalError also for a request that only a task may send, before
                   `join`
        """
        if message.speaker and not self.task:
            raise InternalError("the coordinator was asked for something that only a task may ask; join first")
        if timeout_s is None:
            timeout_s = _timeout_s(message)
        return self.session.ask(message, timeout_s)

    # The other tasks.

    def ask_for_dumps(self, why: str) -> None:
        """Make the other tasks dump their newest events; does nothing while there is no coordinator."""
        self.session.tell(DumpEvents(why, self.task))

    def describe(self, task: str) -> str:
        """Describe the task for an error: its last heartbeat, what it works on, or why it is absent.

        Never raises. Asks the coordinator, for at most `DESCRIBE_S`. Uses the roster alone when it cannot ask: on a
        connection's reader thread, or while the coordinator is away.
        """
        if on_reader_thread() or self.session.ended or self.session.outage:
            known = self.session.outage.removeprefix("; ") or "as far as is known here"
            return f"{_absence(self.session.roster, task)} ({known})"
        try:
            health = self.session.ask(GetHealth(task), DESCRIBE_S)
        except DflowError as error:
            return f"{_absence(self.session.roster, task)} (nothing more is known: {error})"
        return describe_task(task, health)

    def wait_for_tasks(self, tasks: Iterable[str], *, timeout_s: float) -> Roster:
        """Wait until all `tasks` are live; return the roster that lists them.

        raises  DeadlineExceeded naming the missing tasks, and why each left if it had joined;
                TransportClosed when the coordinator is lost for good meanwhile
        """
        wanted = tuple(tasks)

        def missing(roster: Roster) -> list[str]:
            live = {info.task for info in roster.tasks if info.left_at_s is None}
            return [task for task in wanted if task not in live]

        roster = self.session.wait_for_roster(lambda roster: not missing(roster), timeout_s)
        if absent := missing(roster):
            who = ", ".join(_absence(roster, task) for task in absent)
            raise DeadlineExceeded(
                f"waited {timeout_s:g} s for {len(wanted)} tasks, and {len(absent)} are missing: {who}; "
                f"check that they were started and their output{self.session.outage}"
            )
        return roster

    def _beat(self) -> None:
        self.session.tell(self._heartbeat())


def _timeout_s(message: Message) -> float:
    match message:
        case DecideOnce() | ElectOnce():
            return AGREE_S
        case AwaitBarrier():
            return message.timeout_s + BARRIER_GRACE_S
        case _:
            return ANSWER_S


def _absence(roster: Roster, task: str) -> str:
    last = next((info for info in reversed(roster.tasks) if info.task == task), None)
    if last is None or last.left_at_s is None:
        return short_task_name(task)
    return f"{short_task_name(task)} (left at {last.left_at_s:.1f} s: {last.left})"
