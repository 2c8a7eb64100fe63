"""The coordinator's requests as method calls, for tasks, workers and tools; `session_driver` transmits them.

Invariants:
- every call has a deadline, and waits until then even while the coordinator is away;
- `roster` is the newest one that the coordinator sent, as soon as `join` has returned;
- heartbeats are sent from `join` to `leave` or `close` while there is a connection, whatever the program does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.client.session_driver import SessionDriver
from dflow.distributed.coordinator.membership import FINISHED
from dflow.distributed.coordinator.task_description import describe_task
from dflow.distributed.coordinator.traffic_totals import largest
from dflow.distributed.transport.base import Transport
from dflow.distributed.transport.exchange import on_reader_thread
from dflow.distributed.wire.messages import (
    AwaitBarrier,
    BarrierPassed,
    Claimed,
    ClaimSteps,
    DumpEvents,
    EdgeTraffic,
    Elected,
    ElectOnce,
    Failure,
    GetHealth,
    GetStatus,
    Health,
    Heartbeat,
    Join,
    Leave,
    NotFinite,
    Ok,
    Placed,
    PlacedAll,
    PlaceVariable,
    PlaceVariables,
    Report,
    Roster,
    RoundsDone,
    Status,
    TaskInfo,
    Unplace,
)
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, InternalError

#: Deadline of a call that the coordinator answers immediately, in s.
ANSWER_S = 30.0
#: The most variables that one message places.
MOST_PLACED = 256
#: The coordinator enforces a barrier's timeout; the client waits this much longer for its answer.
BARRIER_GRACE_S = 5.0
#: Deadline of the health request that adds detail to an error, in s.
DESCRIBE_S = 1.0
#: Deadline of a claim, which may wait for other workers to end their last steps, in s.
CLAIM_S = 3600.0
#: A claim that waits longer is logged, with the workers that hold the steps.
LONG_CLAIM_S = 60.0
LOGGER = logging.getLogger("dflow")


def _no_traffic() -> tuple[EdgeTraffic, ...]:
    return ()


class CoordinatorClient:
    """A connection to the coordinator at `address`, as `name`; `SessionDriver` documents its arguments and errors."""

    def __init__(
        self,
        transport: Transport,
        address: str,
        *,
        name: str,
        timeout_s: float = ANSWER_S,
        settings: SessionSettings | None = None,
        is_threaded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = ""
        self._traffic: Callable[[], tuple[EdgeTraffic, ...]] = _no_traffic
        self._steps: Callable[[], int] = lambda: 0
        self._doing: Callable[[], str] = str
        self._clock = clock
        self._claims_since_s: float | None = None
        self._driver = SessionDriver(
            transport,
            address,
            self._beat,
            name=name,
            timeout_s=timeout_s,
            settings=settings,
            is_threaded=is_threaded,
            clock=clock,
        )

    # Being a task.

    def join(
        self,
        task: str,
        address: str,
        *,
        traffic: Callable[[], tuple[EdgeTraffic, ...]] = _no_traffic,
        steps: Callable[[], int] = lambda: 0,
        doing: Callable[[], str] = str,
        timeout_s: float = ANSWER_S,
    ) -> Roster:
        """Join as the task `task`, which listens at `address`, and start the heartbeats.

        The callables are called before each heartbeat, which carries their results:
        `traffic`  what the task has sent since it started
        `steps`    number of parts of steps that it has ended
        `doing`    short text on what it works on, empty when idle; a task that is busy and ends no part has stalled
        raises     RemoteError with both addresses when a live task has the name; DeviceError for a malformed name
        """
        self._task, self._traffic, self._steps, self._doing = task, traffic, steps, doing
        self._driver.beat_later()
        try:
            self._driver.ask(Join(task, address), Roster, timeout_s)
        except BaseException:
            self._task = ""
            raise
        return self.roster

    def leave(self, reason: str = FINISHED, *, timeout_s: float = 5.0) -> None:
        """Send a last heartbeat, leave the cluster and close; does not raise when the coordinator has gone.

        Waits at most `timeout_s` for a coordinator that is away, which would otherwise declare this task dead.
        """
        if self._task and not self._driver.is_closed:
            self._beat()
            with contextlib.suppress(DflowError):
                self._driver.ask(Leave(self._task, reason), Ok, timeout_s)
        self.close(reason)

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection; a task that has joined then leaves with a fault. A second call does nothing."""
        self._driver.close(reason)

    @property
    def process(self) -> str:
        """Identity of this process among all that join under the task's name; see `TaskInfo.process`."""
        return self._driver.process

    # The other tasks.

    @property
    def roster(self) -> Roster:
        """The tasks that have joined, including any that have left, and the expected ones."""
        return self._driver.roster

    @property
    def lost(self) -> str:
        """Why the coordinator is lost for good; empty while there is a connection or one may come back."""
        return self._driver.lost

    @property
    def open_asks(self) -> int:
        """Number of requests without an answer."""
        return self._driver.open_asks

    def live(self, task: str) -> TaskInfo | None:
        """Return the live task of that name, or None."""
        return _live(self.roster, task)

    @property
    def outage(self) -> str:
        """How long the connection has been down and why, as the end of a sentence; empty while there is one."""
        return self._driver.outage

    def call_on_roster(self, callback: Callable[[Roster], None]) -> None:
        """Call back with each new roster, and immediately with the present one."""
        self._driver.call_on_roster(callback)

    def call_on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back once with the reason when the coordinator is lost for good, or now if it is; not after `close`."""
        self._driver.call_on_lost(callback)

    def call_on_dump(self, callback: Callable[[str], None]) -> None:
        """Call back with the reason when this task must dump its newest events. The callback must not block."""
        self._driver.call_on_dump(callback)

    def ask_for_dumps(self, why: str) -> None:
        """Make the other tasks dump their newest events; does nothing while there is no coordinator."""
        self._driver.tell(DumpEvents(why, self._task))

    def describe(self, task: str) -> str:
        """Describe the task for an error: its last heartbeat, what it works on, or why it is absent.

        Never raises. Asks the coordinator, for at most `DESCRIBE_S`. Uses the roster alone when it cannot ask: on a
        connection's reader thread, or while the coordinator is away.
        """
        if on_reader_thread() or self._driver.ended or self.outage:
            return f"{_absence(self.roster, task)} ({self.outage.removeprefix('; ') or 'as far as is known here'})"
        try:
            health = self._driver.ask(GetHealth(task), Health, DESCRIBE_S)
        except DflowError as error:
            return f"{_absence(self.roster, task)} (nothing more is known: {error})"
        return describe_task(task, health)

    def wait_for_tasks(self, tasks: Iterable[str], *, timeout_s: float) -> Roster:
        """Wait until all `tasks` are live; return the roster that lists them.

        raises  DeadlineExceeded naming the missing tasks, and why each left if it had joined;
                TransportClosed when the coordinator is lost for good meanwhile
        """
        wanted = tuple(tasks)

        def missing(roster: Roster) -> list[str]:
            return [task for task in wanted if _live(roster, task) is None]

        roster = self._driver.wait_for_roster(lambda roster: not missing(roster), timeout_s)
        if absent := missing(roster):
            who = ", ".join(_absence(roster, task) for task in absent)
            raise DeadlineExceeded(
                f"waited {timeout_s:g} s for {len(wanted)} tasks, and {len(absent)} are missing: {who}; "
                f"check that they were started and their output{self.outage}"
            )
        return roster

    # What the coordinator decides.

    def place(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        size_bytes: int,
        *,
        job: str = "ps",
        near: str = "",
        kind: str = "variable",
        on: str = "",
        timeout_s: float = ANSWER_S,
    ) -> Placed:
        """Return the task and process that hold the variable, the same for every requester; see `PlaceVariable`.

        raises  VariableError when the name has another type or `near` is not placed; DeviceError without such a job,
                or when the variable is on another task than `on`; TaskLost when the process that held it has left
        """
        request = PlaceVariable(name, dtype, shape, size_bytes, job, near, kind, on)
        return self._driver.ask(request, Placed, timeout_s)

    def place_all(self, requests: Sequence[PlaceVariable], *, timeout_s: float = ANSWER_S) -> list[Placed | Failure]:
        """Return for each request the task as in `place`, or the failure, in order."""
        answers: list[Placed | Failure] = []
        for first in range(0, len(requests), MOST_PLACED):
            part = PlaceVariables(tuple(requests[first : first + MOST_PLACED]))
            answers += self._driver.ask(part, PlacedAll, timeout_s).answers
        return answers

    def unplace(self, name: str, *, timeout_s: float = ANSWER_S) -> None:
        """Free a name whose state no longer exists."""
        self._driver.ask(Unplace(name), Ok, timeout_s)

    def claim(
        self,
        run: str,
        total_steps: int,
        *,
        done: int = 0,
        step_s: float = 0.0,
        metrics: Mapping[str, float] | None = None,
        more: bool = True,
        not_finite: NotFinite | None = None,
        timeout_s: float = CLAIM_S,
    ) -> range:
        """Report the last claim and get the next steps; an empty range means that the run is complete.

        Waits while other workers may return steps. With `more` false it returns the steps not done to the pool,
        does not wait and gets no steps.
        raises  RemoteError when the run has another number of steps; TaskLost when this task has left
        """
        task = self._require_task()
        # The session sets the numbers.
        request = ClaimSteps(run, task, total_steps, 0, 0, done, step_s, dict(metrics or {}), more, not_finite)
        self._claims_since_s = self._clock()
        try:
            claimed = self._driver.ask(request, Claimed, timeout_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}{self._holders()}") from None
        finally:
            self._claims_since_s = None
        return range(claimed.first, claimed.first + claimed.count)

    def _holders(self) -> str:
        """The workers that hold claimed steps, as the end of an error; empty if there are none or none are known."""
        try:
            workers = self.status(timeout_s=DESCRIBE_S).workers
        except DflowError:
            return ""
        held = [f"{self.describe(one.task)} holds {one.held}" for one in workers if one.held and one.task != self._task]
        return (
            f"; of the claimed steps, {', '.join(held)}: see its output, or end it, and others do them" if held else ""
        )

    def elect(self, what: str, *, timeout_s: float = ANSWER_S) -> bool:
        """Return whether this task is the one that does `what`: the first live task that asks."""
        return self._driver.ask(ElectOnce(what, self._require_task()), Elected, timeout_s).elected

    def barrier(self, name: str, *, timeout_s: float, fails_on_leave: bool = False) -> BarrierPassed:
        """Wait until all members have come to the barrier; the answer lists them.

        Members are the tasks of this one's job that are live or expected at the first arrival. The barrier goes on
        without a member that leaves, or fails if any waiting task set `fails_on_leave`. A task that joins later is
        a member of the next generation.
        raises  DeadlineExceeded naming the missing tasks; TaskLost when the barrier has failed
        """
        request = AwaitBarrier(name, self._require_task(), 0, timeout_s, fails_on_leave)
        return self._driver.ask(request, BarrierPassed, timeout_s + BARRIER_GRACE_S)

    def tell_rounds(self, report: RoundsDone) -> None:
        """Report the progress of a run of synchronous training; does not wait, and is dropped during an outage."""
        self._driver.tell(report)

    def report(self, name: str, value: float, *, timeout_s: float = ANSWER_S) -> None:
        """Add a result to the closing table."""
        self._driver.ask(Report(name, value), Ok, timeout_s)

    def status(self, *, timeout_s: float = ANSWER_S) -> Status:
        """Return a snapshot of the cluster."""
        return self._driver.ask(GetStatus(), Status, timeout_s)

    def tick(self) -> None:
        """Send heartbeats and reconnect when due; only needed without a thread."""
        self._driver.tick()

    def _require_task(self) -> str:
        if not self._task:
            raise InternalError("the coordinator was asked for something that only a task may ask; join first")
        return self._task

    def _beat(self) -> None:
        self._driver.tell(Heartbeat(self._task, largest(self._traffic()), self._steps(), self._doing()))
        since_s = self._claims_since_s
        if since_s is not None and self._clock() - since_s >= LONG_CLAIM_S:
            self._claims_since_s = None
            threading.Thread(target=self._announce_wait, name="dflow long claim", daemon=True).start()

    def _announce_wait(self) -> None:
        LOGGER.warning("%s has waited %g s for steps%s", short_task_name(self._task), LONG_CLAIM_S, self._holders())


def _live(roster: Roster, task: str) -> TaskInfo | None:
    return next((info for info in roster.tasks if info.task == task and info.left_at_s is None), None)


def _absence(roster: Roster, task: str) -> str:
    for info in reversed(roster.tasks):
        if info.task == task and info.left_at_s is None:
            return short_task_name(task)
        if info.task == task:
            return f"{short_task_name(task)} (left at {info.left_at_s or 0.0:.1f} s: {info.left})"
    return short_task_name(task)
