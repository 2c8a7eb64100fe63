"""What a task, a worker or a tool says to the coordinator, as calls; `session_driver` carries them there.

Invariants:
- every call has a deadline, and waits through the coordinator's absence until then;
- `roster` is the newest one the coordinator sent, from the moment `join` returns on;
- heartbeats are sent from `join` to `leave` or `close` while there is a connection, whatever the program does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from dflow.distributed.coordinator_session import SessionSettings
from dflow.distributed.membership import FINISHED
from dflow.distributed.messages import (
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
from dflow.distributed.session_driver import SessionDriver
from dflow.distributed.task_description import describe_task
from dflow.distributed.traffic_totals import largest
from dflow.distributed.transport.base import Transport
from dflow.distributed.transport.exchange import on_reader_thread
from dflow.tracing.errors import DeadlineExceeded, DflowError, InternalError
from dflow.tracing.task_name import short_task_name

#: How long a call waits for an answer that the coordinator gives at once.
ANSWER_S = 30.0
#: The most variables that one message asks for.
MOST_PLACED = 256
#: The coordinator ends a wait at a barrier by itself; a client that hears nothing gives it this much more.
BARRIER_GRACE_S = 5.0
#: How long an error waits for what the coordinator knows of a task.
DESCRIBE_S = 1.0
#: How long a claim may wait for other workers to end their last steps.
CLAIM_S = 3600.0
#: A claim that waits longer is announced, with the workers that hold the steps.
LONG_CLAIM_S = 60.0
LOGGER = logging.getLogger("dflow")


def _no_traffic() -> tuple[EdgeTraffic, ...]:
    return ()


class CoordinatorClient:
    """A connection to the coordinator at `address`, as `name`; see `SessionDriver` for its arguments and errors."""

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
        """Be the task `task`, which listens at `address`, and start the heartbeats.

        What each heartbeat tells is asked before it:
        `traffic`  what the task has sent so far
        `steps`    how many parts of steps it has ended so far
        `doing`    what it is at, as a short text, empty when it is idle; busy without end of a step is a stall
        raises     RemoteError when a live task has the name, with both addresses; DeviceError when it is no name
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
        """Tell the last traffic, leave the cluster and close; does not raise when the coordinator has gone.

        Waits for a coordinator that is away for `timeout_s`, since it would take the task for one that failed.
        """
        if self._task and not self._driver.is_closed:
            self._beat()
            with contextlib.suppress(DflowError):
                self._driver.ask(Leave(self._task, reason), Ok, timeout_s)
        self.close(reason)

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection, which is a leave with a fault if the task has joined; a second call does nothing."""
        self._driver.close(reason)

    @property
    def process(self) -> str:
        """What tells this process from all others that join under the name; see `TaskInfo.process`."""
        return self._driver.process

    # The other tasks.

    @property
    def roster(self) -> Roster:
        """Who has joined, who has left, who is expected."""
        return self._driver.roster

    @property
    def lost(self) -> str:
        """Why there is no coordinator for this client any more; empty while there is, or may yet be again."""
        return self._driver.lost

    @property
    def open_asks(self) -> int:
        """How many asks have no answer."""
        return self._driver.open_asks

    def live(self, task: str) -> TaskInfo | None:
        """The live task of that name."""
        return _live(self.roster, task)

    @property
    def outage(self) -> str:
        """Since when there is no connection to the coordinator and why, as the end of a sentence; empty with one."""
        return self._driver.outage

    def call_on_roster(self, callback: Callable[[Roster], None]) -> None:
        """Call back with each new roster, and now with the one there is."""
        self._driver.call_on_roster(callback)

    def call_on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back once with the reason when the coordinator is lost for good, or now if it is; not after `close`."""
        self._driver.call_on_lost(callback)

    def call_on_dump(self, callback: Callable[[str], None]) -> None:
        """Call back with the reason when the tasks are to write their last events down. It must not wait."""
        self._driver.call_on_dump(callback)

    def ask_for_dumps(self, why: str) -> None:
        """Have the other tasks write their last events down; nothing happens while there is no coordinator."""
        self._driver.tell(DumpEvents(why, self._task))

    def describe(self, task: str) -> str:
        """The task for an error about it: when it was last heard, what it is at, or why it is not there.

        Never raises. Asks the coordinator, which may take `DESCRIBE_S`; says what is known here when that cannot be
        asked, as on a thread that reads a connection.
        """
        if on_reader_thread() or self._driver.ended or self.outage:
            return f"{_absence(self.roster, task)} ({self.outage.removeprefix('; ') or 'as far as is known here'})"
        try:
            health = self._driver.ask(GetHealth(task), Health, DESCRIBE_S)
        except DflowError as error:
            return f"{_absence(self.roster, task)} (nothing more is known: {error})"
        return describe_task(task, health)

    def wait_for_tasks(self, tasks: Iterable[str], *, timeout_s: float) -> Roster:
        """Wait until all `tasks` are live; the roster in which they are.

        raises  DeadlineExceeded naming those that are missing, and why each left if it was there;
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
        """The task that holds the variable, and which of its processes, the same for every asker; see `PlaceVariable`.

        raises  VariableError when the name has another type or `near` is not placed; DeviceError without such a job,
                and when it is on another task than `on`; TaskLost when the process that held it has left
        """
        request = PlaceVariable(name, dtype, shape, size_bytes, job, near, kind, on)
        return self._driver.ask(request, Placed, timeout_s)

    def place_all(self, requests: Sequence[PlaceVariable], *, timeout_s: float = ANSWER_S) -> list[Placed | Failure]:
        """The task of each of these variables, as `place` has it, or why there is none."""
        answers: list[Placed | Failure] = []
        for first in range(0, len(requests), MOST_PLACED):
            part = PlaceVariables(tuple(requests[first : first + MOST_PLACED]))
            answers += self._driver.ask(part, PlacedAll, timeout_s).answers
        return answers

    def unplace(self, name: str, *, timeout_s: float = ANSWER_S) -> None:
        """Free a name whose state is gone."""
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
        """Report the last claim and get the next steps to do; an empty range says that the run is complete.

        Waits while other workers may yet give steps back. With `more` false it gives back what was not done, waits
        for nothing and gets no steps.
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
        """The workers that hold claimed steps, as the end of an error; empty if there is none or it is not known."""
        try:
            workers = self.status(timeout_s=DESCRIBE_S).workers
        except DflowError:
            return ""
        held = [f"{self.describe(one.task)} holds {one.held}" for one in workers if one.held and one.task != self._task]
        return (
            f"; of the claimed steps, {', '.join(held)}: see its output, or end it, and others do them" if held else ""
        )

    def elect(self, what: str, *, timeout_s: float = ANSWER_S) -> bool:
        """Whether this task is the one that does `what`."""
        return self._driver.ask(ElectOnce(what, self._require_task()), Elected, timeout_s).elected

    def barrier(self, name: str, *, timeout_s: float, fails_on_leave: bool = False) -> BarrierPassed:
        """Wait until all tasks of this one's job have come to the barrier; who they are is in the answer.

        They are those that are live or expected when the first comes. One that leaves is waited for no longer, or with
        `fails_on_leave` of any that waits fails the barrier; one that joins meanwhile is of the next.
        raises  DeadlineExceeded naming those that are missing; TaskLost when the barrier has failed
        """
        request = AwaitBarrier(name, self._require_task(), 0, timeout_s, fails_on_leave)
        return self._driver.ask(request, BarrierPassed, timeout_s + BARRIER_GRACE_S)

    def tell_rounds(self, report: RoundsDone) -> None:
        """Say how a run of synchronous training goes; nobody waits, and without a coordinator it is not said."""
        self._driver.tell(report)

    def report(self, name: str, value: float, *, timeout_s: float = ANSWER_S) -> None:
        """Add a result to the closing table."""
        self._driver.ask(Report(name, value), Ok, timeout_s)

    def status(self, *, timeout_s: float = ANSWER_S) -> Status:
        """Everything the coordinator knows that a person would ask."""
        return self._driver.ask(GetStatus(), Status, timeout_s)

    def tick(self) -> None:
        """Beat and connect if that is due; only needed without a thread."""
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
