"""What a task, a worker or a tool says to the coordinator, as calls.

Invariants:
- every call has a deadline;
- `roster` is the newest one the coordinator sent, from the moment `join` returns to the end of the connection;
- callbacks get the rosters in order, on the thread that reads the connection: they must not wait, and must not call
  the coordinator;
- heartbeats are sent from `join` to `leave` or `close`, whatever the program does.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from dflow.distributed.membership import FINISHED
from dflow.distributed.messages import (
    AnyMessage,
    Claimed,
    ClaimSteps,
    EdgeTraffic,
    Elected,
    ElectOnce,
    GetStatus,
    Heartbeat,
    Join,
    Leave,
    Message,
    Ok,
    Placed,
    PlaceVariable,
    Report,
    Roster,
    Status,
    TaskInfo,
    Unplace,
)
from dflow.distributed.traffic_totals import largest
from dflow.distributed.transport.base import Peer, RefuseAll, Transport
from dflow.tracing.errors import DeadlineExceeded, DflowError, InternalError, TransportClosed, WireError
from dflow.tracing.task_name import short_task_name

HEARTBEAT_S = 1.0
#: How long a call waits for an answer that the coordinator gives at once.
ANSWER_S = 30.0
#: How long a claim may wait for other workers to end their last steps.
CLAIM_S = 3600.0

_Answer = TypeVar("_Answer", bound=Message)


def _no_traffic() -> tuple[EdgeTraffic, ...]:
    return ()


class CoordinatorClient(RefuseAll):
    """One connection to the coordinator at `address`, as `name`.

    raises  DeadlineExceeded naming the coordinator, the address and the time it was tried; what `connect` raises
    """

    def __init__(self, transport: Transport, address: str, *, name: str, timeout_s: float = ANSWER_S) -> None:
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._roster = Roster((), ())
        self._on_roster: list[Callable[[Roster], None]] = []
        self._on_lost: list[Callable[[str], None]] = []
        self._lost = ""
        self._task = ""
        self._traffic: Callable[[], tuple[EdgeTraffic, ...]] = _no_traffic
        self._stopped = threading.Event()
        self._closed = False
        self._claim_numbers = itertools.count(1)
        self._last_claims: dict[str, int] = {}
        self.address = address
        self._peer: Peer = transport.connect(
            address, name=name, handler=self, who="the coordinator", timeout_s=timeout_s
        )

    # Being a task.

    def join(
        self,
        task: str,
        address: str,
        *,
        traffic: Callable[[], tuple[EdgeTraffic, ...]] = _no_traffic,
        timeout_s: float = ANSWER_S,
    ) -> Roster:
        """Be the task `task`, which listens at `address`, and start the heartbeats.

        `traffic`  what the task has sent so far, asked before each heartbeat
        raises     RemoteError when a live task has the name, with both addresses; DeviceError when it is no name
        """
        roster = self._ask(Join(task, address, secrets.token_hex(8)), Roster, timeout_s)
        with self._changed:
            self._task, self._traffic = task, traffic
            if not self._roster.tasks:  # else a newer one has overtaken this answer
                self._roster = roster
            self._changed.notify_all()
        threading.Thread(target=self._beat, name="dflow heartbeat", daemon=True).start()
        return self.roster

    def leave(self, reason: str = FINISHED, *, timeout_s: float = 5.0) -> None:
        """Tell the last traffic, leave the cluster and close; does not raise when the coordinator has gone."""
        if self._task and not self._stopped.is_set():
            with contextlib.suppress(TransportClosed, DeadlineExceeded):
                self._peer.notify(Heartbeat(self._task, largest(self._traffic())))
                self._ask(Leave(self._task, reason), Ok, timeout_s)
                self._stopped.set()
        self.close(reason)

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection, which is a leave with a fault if the task has joined; a second call does nothing."""
        if self._task and not self._stopped.is_set():
            with contextlib.suppress(TransportClosed):
                self._peer.notify(Leave(self._task, reason))
        self._closed = True
        self._stopped.set()
        self._peer.close(reason)

    # The other tasks.

    @property
    def roster(self) -> Roster:
        """Who has joined, who has left, who is expected."""
        with self._changed:
            return self._roster

    @property
    def lost(self) -> str:
        """Why the connection to the coordinator has ended; empty while it is open."""
        with self._changed:
            return self._lost

    def live(self, task: str) -> TaskInfo | None:
        """The live task of that name."""
        return _live(self.roster, task)

    def call_on_roster(self, callback: Callable[[Roster], None]) -> None:
        """Call back with each new roster, and now with the one there is."""
        with self._calling:
            with self._changed:
                self._on_roster.append(callback)
                roster = self._roster
            callback(roster)

    def call_on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back once with the reason when the coordinator is lost, or now if it is; not after `close`."""
        with self._changed:
            self._on_lost.append(callback)
            lost = self._lost
        if lost and not self._closed:
            callback(lost)

    def wait_for_tasks(self, tasks: Iterable[str], *, timeout_s: float) -> Roster:
        """Wait until all `tasks` are live; the roster in which they are.

        raises  DeadlineExceeded naming those that are missing, and why each left if it was there;
                TransportClosed when the coordinator is lost meanwhile
        """
        wanted, deadline = tuple(tasks), time.monotonic() + timeout_s
        with self._changed:
            while missing := [task for task in wanted if _live(self._roster, task) is None]:
                if self._lost:
                    raise TransportClosed(f"the coordinator at {self.address} is lost: {self._lost}")
                if not self._changed.wait(deadline - time.monotonic()):
                    who = ", ".join(_absence(self._roster, task) for task in missing)
                    raise DeadlineExceeded(
                        f"waited {timeout_s:g} s for {len(wanted)} tasks, and {len(missing)} are missing: {who}; "
                        "check that they were started and their output"
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
        task, number = self._require_task(), next(self._claim_numbers)
        last = self._last_claims.get(run, 0)
        request = ClaimSteps(run, task, total_steps, number, last, done, step_s, dict(metrics or {}), more)
        claimed = self._ask(request, Claimed, timeout_s)
        self._last_claims[run] = number
        return range(claimed.first, claimed.first + claimed.count)

    def elect(self, what: str, *, timeout_s: float = ANSWER_S) -> bool:
        """Whether this task is the one that does `what`."""
        return self._ask(ElectOnce(what, self._require_task()), Elected, timeout_s).elected

    def report(self, name: str, value: float, *, timeout_s: float = ANSWER_S) -> None:
        """Add a result to the closing table."""
        self._ask(Report(name, value), Ok, timeout_s)

    def status(self, *, timeout_s: float = ANSWER_S) -> Status:
        """Everything the coordinator knows that a person would ask."""
        return self._ask(GetStatus(), Status, timeout_s)

    # The connection's side; see `transport.base.Handler`.

    def on_notify(self, peer: Peer, message: AnyMessage, payload: memoryview) -> None:
        """Keep the newest roster."""
        if not isinstance(message, Roster):
            return
        with self._calling:
            with self._changed:
                self._roster = message
                callbacks = list(self._on_roster)
                self._changed.notify_all()
            for callback in callbacks:
                callback(message)

    def on_close(self, peer: Peer, reason: str) -> None:
        """Wake those who wait, and tell those who asked."""
        with self._changed:
            self._lost = reason
            callbacks = [] if self._closed else list(self._on_lost)
            self._changed.notify_all()
        self._stopped.set()
        for callback in callbacks:
            callback(reason)

    def _ask(self, message: AnyMessage, answer: type[_Answer], timeout_s: float) -> _Answer:
        reply, _ = self._peer.call(message, timeout_s=timeout_s)
        if not isinstance(reply, answer):
            raise WireError(
                f"the coordinator answered {type(message).__name__} by {type(reply).__name__} instead of "
                f"{answer.__name__}; install the same dflow on both"
            )
        return reply

    def _require_task(self) -> str:
        if not self._task:
            raise InternalError("the coordinator was asked for something that only a task may ask; join first")
        return self._task

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            try:
                self._peer.notify(Heartbeat(self._task, largest(self._traffic())))
            except DflowError:
                return


def _live(roster: Roster, task: str) -> TaskInfo | None:
    return next((info for info in roster.tasks if info.task == task and info.left_at_s is None), None)


def _absence(roster: Roster, task: str) -> str:
    for info in reversed(roster.tasks):
        if info.task == task:
            return f"{short_task_name(task)} (left at {info.left_at_s or 0.0:.1f} s: {info.left})"
    return short_task_name(task)
