"""What a task, a worker or a tool says to the coordinator, as calls.

What to do when the coordinator goes and comes back is decided in `coordinator_session`; this file has the connection,
the clock and the thread.

Invariants:
- every call has a deadline, and waits through the coordinator's absence until then;
- `roster` is the newest one the coordinator sent, from the moment `join` returns on;
- callbacks get the rosters in order, one at a time, on any thread: they must not wait, and must not call the
  coordinator;
- heartbeats are sent from `join` to `leave` or `close` while there is a connection, whatever the program does.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TypeVar

from dflow.distributed.coordinator_session import (
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
    Send,
    SessionCommand,
    SessionEvent,
    SessionSettings,
    Settle,
    ShowRoster,
    Tell,
    Withdrawn,
    Woke,
)
from dflow.distributed.failures import error_from, failure_of
from dflow.distributed.large_message import unpack
from dflow.distributed.membership import FINISHED
from dflow.distributed.messages import (
    AnyMessage,
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
    Message,
    Ok,
    Placed,
    PlaceVariable,
    Report,
    Roster,
    RoundsDone,
    Status,
    TaskInfo,
    Unplace,
)
from dflow.distributed.task_description import describe_task
from dflow.distributed.traffic_totals import largest
from dflow.distributed.transport.base import Peer, RefuseAll, Reply, Transport
from dflow.distributed.transport.exchange import on_reader_thread
from dflow.tracing.errors import DeadlineExceeded, DflowError, InternalError, TransportClosed, WireError
from dflow.tracing.task_name import short_task_name

LOGGER = logging.getLogger("dflow")

HEARTBEAT_S = 1.0
#: How long a call waits for an answer that the coordinator gives at once.
ANSWER_S = 30.0
#: The coordinator ends a wait at a barrier by itself; a client that hears nothing gives it this much more.
BARRIER_GRACE_S = 5.0
#: How long an error waits for what the coordinator knows of a task.
DESCRIBE_S = 1.0
#: How long a claim may wait for other workers to end their last steps.
CLAIM_S = 3600.0

_Answer = TypeVar("_Answer", bound=Message)


def _no_traffic() -> tuple[EdgeTraffic, ...]:
    return ()


class CoordinatorClient:
    """A connection to the coordinator at `address`, as `name`, which is made again when it was lost.

    `timeout_s`   how long the first one is tried
    `settings`    how its loss is borne
    `is_threaded` whether a thread of its own beats and connects; without one, `tick` has to be called again and again
    `clock`       seconds since any moment
    raises        DeadlineExceeded naming the coordinator, the address and the time it was tried; what `connect` raises
    """

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
        self.address = address
        self._transport = transport
        self._name = name
        self._clock = clock
        self._settings = settings or SessionSettings()
        self._session = CoordinatorSession(
            who=f"the coordinator at {address}",
            incarnation=secrets.token_hex(8),
            settings=self._settings,
            seed=secrets.randbits(64),
        )
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._roster = Roster((), ())
        self._on_roster: list[Callable[[Roster], None]] = []
        self._on_lost: list[Callable[[str], None]] = []
        self._on_dump: list[Callable[[str], None]] = []
        self._task = ""
        self._traffic: Callable[[], tuple[EdgeTraffic, ...]] = _no_traffic
        self._steps: Callable[[], int] = lambda: 0
        self._doing: Callable[[], str] = str
        self._beat_at_s = 0.0
        self._closed = False
        self._todo: deque[SessionCommand] = deque()
        self._is_carrying_out = False
        self._must_open = False
        self._links: dict[int, Peer] = {}
        self._link_numbers = itertools.count(1)
        self._ask_numbers = itertools.count(1)
        self._answers: dict[int, Future[AnyMessage]] = {}
        self._open(timeout_s)
        if is_threaded:
            threading.Thread(target=self._run, name="dflow coordinator link", daemon=True).start()

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
        self._beat_at_s = self._clock() + HEARTBEAT_S
        try:
            self._ask(Join(task, address), Roster, timeout_s)
        except BaseException:
            self._task = ""
            raise
        return self.roster

    def leave(self, reason: str = FINISHED, *, timeout_s: float = 5.0) -> None:
        """Tell the last traffic, leave the cluster and close; does not raise when the coordinator has gone.

        Waits for a coordinator that is away for `timeout_s`, since it would take the task for one that failed.
        """
        if self._task and not self._closed:
            self._beat()
            with contextlib.suppress(DflowError):
                self._ask(Leave(self._task, reason), Ok, timeout_s)
        self.close(reason)

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection, which is a leave with a fault if the task has joined; a second call does nothing."""
        self._closed = True
        self._handle(Ending(self._clock(), reason))

    # The other tasks.

    @property
    def roster(self) -> Roster:
        """Who has joined, who has left, who is expected."""
        with self._changed:
            return self._roster

    @property
    def lost(self) -> str:
        """Why there is no coordinator for this client any more; empty while there is, or may yet be again."""
        with self._changed:
            return "" if self._closed else self._session.ended

    def live(self, task: str) -> TaskInfo | None:
        """The live task of that name."""
        return _live(self.roster, task)

    @property
    def outage(self) -> str:
        """Since when there is no connection to the coordinator and why, as the end of a sentence; empty with one."""
        with self._changed:
            return self._session.outage(self._clock())

    def call_on_roster(self, callback: Callable[[Roster], None]) -> None:
        """Call back with each new roster, and now with the one there is."""
        with self._calling:
            with self._changed:
                self._on_roster.append(callback)
                roster = self._roster
            callback(roster)

    def call_on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back once with the reason when the coordinator is lost for good, or now if it is; not after `close`."""
        with self._changed:
            lost = self.lost
            if not lost:
                self._on_lost.append(callback)
        if lost:
            callback(lost)

    def call_on_dump(self, callback: Callable[[str], None]) -> None:
        """Call back with the reason when the tasks are to write their last events down. It must not wait."""
        self._on_dump.append(callback)

    def ask_for_dumps(self, why: str) -> None:
        """Have the other tasks write their last events down; nothing happens while there is no coordinator."""
        link = self._session.joined_link
        if link is not None:
            self._carry_out(Tell(link, DumpEvents(why, self._task)))

    def describe(self, task: str) -> str:
        """The task for an error about it: when it was last heard, what it is at, or why it is not there.

        Never raises. Asks the coordinator, which may take `DESCRIBE_S`; says what is known here when that cannot be
        asked, as on a thread that reads a connection.
        """
        if on_reader_thread() or self._session.ended or self.outage:
            return f"{_absence(self.roster, task)} ({self.outage.removeprefix('; ') or 'as far as is known here'})"
        try:
            health = self._ask(GetHealth(task), Health, DESCRIBE_S)
        except DflowError as error:
            return f"{_absence(self.roster, task)} (nothing more is known: {error})"
        return describe_task(task, health)

    def wait_for_tasks(self, tasks: Iterable[str], *, timeout_s: float) -> Roster:
        """Wait until all `tasks` are live; the roster in which they are.

        raises  DeadlineExceeded naming those that are missing, and why each left if it was there;
                TransportClosed when the coordinator is lost for good meanwhile
        """
        wanted, deadline = tuple(tasks), time.monotonic() + timeout_s
        with self._changed:
            while missing := [task for task in wanted if _live(self._roster, task) is None]:
                if self._session.ended:
                    raise TransportClosed(self._session.ended)
                if not self._changed.wait(deadline - time.monotonic()):
                    who = ", ".join(_absence(self._roster, task) for task in missing)
                    raise DeadlineExceeded(
                        f"waited {timeout_s:g} s for {len(wanted)} tasks, and {len(missing)} are missing: {who}; "
                        f"check that they were started and their output{self.outage}"
                    )
            return self._roster

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
    ) -> str:
        """The task that holds the variable, the same for every asker; see `PlaceVariable`.

        raises  VariableError when the name has another type or `near` is not placed; DeviceError without such a job,
                and when it is on another task than `on`
        """
        request = PlaceVariable(name, dtype, shape, size_bytes, job, near, kind, on)
        return self._ask(request, Placed, timeout_s).task

    def unplace(self, name: str, *, timeout_s: float = ANSWER_S) -> None:
        """Free a name whose state is gone."""
        self._ask(Unplace(name), Ok, timeout_s)

    def claim(
        self,
        run: str,
        total_steps: int,
        *,
        done: int = 0,
        step_s: float = 0.0,
        metrics: Mapping[str, float] | None = None,
        more: bool = True,
        timeout_s: float = CLAIM_S,
    ) -> range:
        """Report the last claim and get the next steps to do; an empty range says that the run is complete.

        Waits while other workers may yet give steps back. With `more` false it gives back what was not done, waits
        for nothing and gets no steps.
        raises  RemoteError when the run has another number of steps; TaskLost when this task has left
        """
        task = self._require_task()
        # The session sets the numbers.
        request = ClaimSteps(run, task, total_steps, 0, 0, done, step_s, dict(metrics or {}), more)
        claimed = self._ask(request, Claimed, timeout_s)
        return range(claimed.first, claimed.first + claimed.count)

    def elect(self, what: str, *, timeout_s: float = ANSWER_S) -> bool:
        """Whether this task is the one that does `what`."""
        return self._ask(ElectOnce(what, self._require_task()), Elected, timeout_s).elected

    def barrier(self, name: str, *, timeout_s: float, fails_on_leave: bool = False) -> BarrierPassed:
        """Wait until all tasks of this one's job have come to the barrier; who they are is in the answer.

        They are those that are live or expected when the first comes. One that leaves is waited for no longer, or with
        `fails_on_leave` of any that waits fails the barrier; one that joins meanwhile is of the next.
        raises  DeadlineExceeded naming those that are missing; TaskLost when the barrier has failed
        """
        request = AwaitBarrier(name, self._require_task(), 0, timeout_s, fails_on_leave)
        return self._ask(request, BarrierPassed, timeout_s + BARRIER_GRACE_S)

    def tell_rounds(self, report: RoundsDone) -> None:
        """Say how a run of synchronous training goes; nobody waits, and without a coordinator it is not said."""
        self._tell(report)

    def report(self, name: str, value: float, *, timeout_s: float = ANSWER_S) -> None:
        """Add a result to the closing table."""
        self._ask(Report(name, value), Ok, timeout_s)

    def status(self, *, timeout_s: float = ANSWER_S) -> Status:
        """Everything the coordinator knows that a person would ask."""
        return self._ask(GetStatus(), Status, timeout_s)

    # The connection's side.

    def tick(self) -> None:
        """Beat and connect if that is due; only needed without a thread."""
        now_s = self._clock()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + HEARTBEAT_S
            self._beat()
        self._handle(Woke(now_s))
        if self._take_open():
            self._try_to_open()

    def _run(self) -> None:
        while self._wait_until_due():
            try:
                self.tick()
            except Exception:  # of a callback: without this thread the task would be taken for dead
                LOGGER.exception("%s: the connection to the coordinator goes on after a fault", self._name)

    def _wait_until_due(self) -> bool:
        """Wait until there is something to do; False when it is over."""
        with self._changed:
            while not self._session.ended:
                wake_at_s = self._session.wake_at_s
                due_s = [self._beat_at_s] if self._session.joined_link is not None else []
                due_s += [wake_at_s] if wake_at_s is not None else []
                left_s = min(due_s) - self._clock() if due_s else None
                if self._must_open or (left_s is not None and left_s <= 0):
                    return True
                self._changed.wait(left_s)
            return False

    def _take_open(self) -> bool:
        with self._changed:
            must_open, self._must_open = self._must_open, False
            return must_open

    def _try_to_open(self) -> None:
        try:
            self._open(self._settings.connect_s)
        except Exception as error:  # whatever it is: the session waits for word of it
            self._handle(OpenFailed(self._clock(), str(error) or type(error).__name__))

    def _open(self, timeout_s: float) -> None:
        link = next(self._link_numbers)
        peer = self._transport.connect(
            self.address, name=self._name, handler=_Link(self, link), who="the coordinator", timeout_s=timeout_s
        )
        self._links[link] = peer
        self._handle(Opened(self._clock(), link))
        if peer.closed:  # it may have ended before the session knew of it
            self.link_ended(link, peer.closed)

    def link_ended(self, link: int, reason: str) -> None:
        """The connection `link` is no more."""
        self._links.pop(link, None)
        self._handle(LinkEnded(self._clock(), link, reason))

    def link_heard(self, link: int, message: AnyMessage, payload: memoryview) -> None:
        """A message came over the connection `link` that was not asked for."""
        message = _unpacked(message, payload)
        if isinstance(message, DumpEvents):
            for callback in self._on_dump:
                callback(message.why)
            return
        self._handle(Heard(self._clock(), link, message))

    def _handle(self, event: SessionEvent) -> None:
        with self._changed:
            self._decide(event)
        self._carry_out_all()

    def _decide(self, event: SessionEvent) -> None:
        self._todo.extend(self._session.handle(event))
        self._changed.notify_all()

    def _carry_out_all(self) -> None:
        """In order, and by one thread at a time: one that finds another at it leaves its own commands to that one."""
        while (command := self._next_command()) is not None:
            try:
                self._carry_out(command)
            finally:
                with self._changed:
                    self._is_carrying_out = False

    def _next_command(self) -> SessionCommand | None:
        with self._changed:
            if self._is_carrying_out or not self._todo:
                return None
            self._is_carrying_out = True
            return self._todo.popleft()

    def _carry_out(self, command: SessionCommand) -> None:
        match command:
            case OpenLink():
                with self._changed:
                    self._must_open = True
                    self._changed.notify_all()
            case Send(link, ask, message):
                self._send(link, ask, message)
            case Tell(link, message):
                if (peer := self._links.get(link)) is not None:
                    with contextlib.suppress(TransportClosed):
                        peer.notify(message)
            case EndLink(link, reason):
                if (peer := self._links.pop(link, None)) is not None:
                    peer.close(reason)
            case Settle(ask, message):
                answer = self._answers.pop(ask, None)
                if answer is not None:
                    answer.set_result(message)
            case ShowRoster(roster):
                self._show(roster)
            case GaveUp(reason):
                with self._changed:
                    callbacks = [] if self._closed else list(self._on_lost)
                for callback in callbacks:
                    callback(reason)

    def _send(self, link: int, ask: int, message: AnyMessage) -> None:
        peer = self._links.get(link)
        if peer is None:
            return
        try:
            peer.start(message, on_reply=partial(self._reply_came, link, ask))
        except TransportClosed as error:
            self.link_ended(link, str(error))
        except DflowError as error:
            self._reply_came(link, ask, error)

    def _reply_came(self, link: int, ask: int, reply: Reply | BaseException) -> None:
        if isinstance(reply, TransportClosed):
            return  # the end of the link is told by the link
        message = failure_of(reply) if isinstance(reply, BaseException) else _unpacked(*reply)
        self._handle(Answered(self._clock(), link, ask, message))

    def _show(self, roster: Roster) -> None:
        with self._calling:
            with self._changed:
                self._roster = roster
                callbacks = list(self._on_roster)
                self._changed.notify_all()
            for callback in callbacks:
                callback(roster)

    def _ask(self, message: AnyMessage, wanted: type[_Answer], timeout_s: float) -> _Answer:
        what = type(message).__name__
        if on_reader_thread():
            raise InternalError(f"a handler waits for the coordinator to answer {what}; hand that to another thread")
        future: Future[AnyMessage] = Future()
        with self._changed:
            ask = next(self._ask_numbers)
            self._answers[ask] = future
            self._decide(Asking(self._clock(), ask, message))
        self._carry_out_all()
        try:
            answer = future.result(timeout_s)
        except BaseException as error:
            self._answers.pop(ask, None)
            self._handle(Withdrawn(self._clock(), ask))
            if not isinstance(error, FutureTimeoutError):
                raise
            raise DeadlineExceeded(
                f"the coordinator at {self.address} did not answer {what} of {self._name} within {timeout_s:g} s"
                f"{self.outage}"
            ) from None
        if isinstance(answer, Failure):
            raise error_from(answer)
        if not isinstance(answer, wanted):
            raise WireError(
                f"the coordinator answered {what} by {type(answer).__name__} instead of {wanted.__name__}; "
                "install the same dflow on both"
            )
        return answer

    def _require_task(self) -> str:
        if not self._task:
            raise InternalError("the coordinator was asked for something that only a task may ask; join first")
        return self._task

    def _beat(self) -> None:
        self._tell(Heartbeat(self._task, largest(self._traffic()), self._steps(), self._doing()))

    def _tell(self, message: AnyMessage) -> None:
        """Send a message that has no answer, if there is a connection."""
        link = self._session.joined_link
        peer = self._links.get(link) if link is not None else None
        if peer is not None:
            with contextlib.suppress(DflowError):  # its end is told by the link
                peer.notify(message)


class _Link(RefuseAll):
    """What the client does with the messages of one of its connections."""

    def __init__(self, client: CoordinatorClient, link: int) -> None:
        self._client = client
        self._link = link

    def on_notify(self, peer: Peer, message: AnyMessage, payload: memoryview) -> None:
        """Hand it on."""
        self._client.link_heard(self._link, message, payload)

    def on_close(self, peer: Peer, reason: str) -> None:
        """Hand it on."""
        self._client.link_ended(self._link, reason)


def _unpacked(message: AnyMessage, payload: memoryview) -> AnyMessage:
    try:
        return unpack(message, payload)
    except WireError as error:
        return failure_of(error)


def _live(roster: Roster, task: str) -> TaskInfo | None:
    return next((info for info in roster.tasks if info.task == task and info.left_at_s is None), None)


def _absence(roster: Roster, task: str) -> str:
    for info in reversed(roster.tasks):
        if info.task == task and info.left_at_s is None:
            return short_task_name(task)
        if info.task == task:
            return f"{short_task_name(task)} (left at {info.left_at_s or 0.0:.1f} s: {info.left})"
    return short_task_name(task)
