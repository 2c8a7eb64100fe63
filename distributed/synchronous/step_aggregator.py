"""The step aggregator (round host): a task that applies the average gradients for workers, which may die at any time.

Why: an update that a worker runs is left half done on some tasks when that worker dies. So a parameter task decides
the rounds (`rounds.py`), takes the average from its accumulator, and starts the update itself. Other tasks of variables
keep the gradients of theirs in accumulators of their own; an average has a ticket of each for each gradient (see
`round_gradients.py`). Invariants: the events of a run are handled one at a time and in order; the commands
of one are carried out before the next. A run without a worker keeps only its numbers: a later worker resumes the run,
or learns that it is over. A worker's leave is answered when accumulators that are freed with it are free on all tasks.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import msgspec

from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.steps.plan_checks import MAX_COUNT
from dflow.distributed.synchronous.round_messages import (
    LeaveRounds,
    NextRound,
    OpenRounds,
    ProposeRounds,
    RoundsAgreed,
    RoundsLeft,
    accumulator_on,
    rounds_of,
)
from dflow.distributed.synchronous.rounds import FreeRun, OpenRound, RoundCommand, Rounds, SetEnough
from dflow.distributed.task.arrivals import RequestArrival, RequestTable
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.transport.base import OnReply, Reply, Responder
from dflow.distributed.wire.codec import decode_arrays
from dflow.distributed.wire.failures import error_of
from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.distributed.wire.messages.variables import ForgetState
from dflow.lowering.queues.accumulators import HeldAccumulator
from dflow.lowering.queues.mailbox import Mailbox
from dflow.lowering.queues.pending_operations import Cancel, Results
from dflow.lowering.queues.timers import Stoppable, start_timer
from dflow.lowering.state.applied_steps import StepOfRun
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import (
    CheckpointError,
    DflowError,
    RemoteError,
    StepCancelled,
    TaskLost,
    TransportClosed,
    WireError,
)
from dflow.tracing.ir import ops
from dflow.tracing.ir.resource_op import ResourceOp


class RunCopy(msgspec.Struct, frozen=True):
    """A run between two updates: its numbers of rounds and of gradients in a round, and the number of rounds done.

    process       the process that counted them, which is part of the identity of each round
    is_half_done  whether perhaps some tasks have applied the next round already, as their records say
    """

    name: str
    rounds: int | None
    wanted: int
    agreed: int | None
    done: int
    process: str = ""
    is_half_done: bool = False


class StepAggregator(TaskPart):
    """The runs of synchronous training that a task aggregates; thread-safe."""

    requests: ClassVar[RequestTable[StepAggregator]] = RequestTable()
    saved_as = "rounds"
    copied = tuple[RunCopy, ...]

    def __init__(self, task: TaskServer) -> None:
        self._task, self._accumulators = task, _Accumulators(task)
        self._lock = threading.Lock()
        self._runs: dict[str, _AggregatedRun] = {}

    @requests.queued(ProposeRounds)
    def agree(self, message: ProposeRounds, arrival: RequestArrival) -> RoundsAgreed:
        """Add a worker to a run; the answer has the numbers that the first worker proposed.

        raises  WireError for numbers out of range; TaskLost for a worker that has left the cluster; RemoteError when
                the run has another number of rounds
        """
        _check_counts(message)
        if self._task.channel.has_left(message.worker):
            raise TaskLost(f"{message.worker} has left the cluster, and cannot take part in a run")
        return self._run(message.name).agree(message)

    @requests.queued(OpenRounds)
    def open(self, message: OpenRounds, arrival: RequestArrival) -> None:
        """Become the aggregator of a run: open its next round for the workers that have not left, unless it is open.

        raises  WireError for a malformed request; DflowError when its accumulator is not on this task; TaskLost when
                the run has another one
        """
        _check_counts(message)
        name = self._task.name
        if name not in message.handles:
            raise WireError(f"run {message.name[:64]!r}: expected a plan for {name}, got {[*message.handles]}")
        arrays = decode_arrays((*message.before, *message.after), arrival.payload)
        count = len(message.before)
        update = _MeanUpdate(message, self._task.resources.accumulator(message.key), arrays[:count], arrays[count:])
        # The sender may not know yet of all workers that have left.
        has_left = self._task.channel.has_left
        workers = tuple(worker for worker in message.workers if not message.is_elastic or not has_left(worker))
        self._run(message.name).open(update, workers)

    @requests.queued(NextRound)
    def ask(self, message: NextRound, arrival: RequestArrival) -> None:
        """Answer when a round is open that the worker is not done with, or the run is over; see `Rounds.ready`.

        raises  TaskLost when the run has another accumulator than the worker names
        """
        self._run(message.name).ask(message, arrival.responder)

    @requests.queued(LeaveRounds)
    def leave(self, message: LeaveRounds, arrival: RequestArrival) -> None:
        """Remove a worker that stops taking part; answer when no accumulator of the run is being freed."""
        self._run(message.name).leave_and_answer(message, arrival.responder)

    def copy(self) -> tuple[RunCopy, ...]:
        """Return a copy of the runs, made while no update runs.

        raises  CheckpointError if perhaps only some tasks have applied a round that workers will do again
        """
        return tuple(run.copy() for run in self._all())

    def return_to(self, copy: Iterable[RunCopy], epoch: int) -> None:
        """Set the runs to copies, closed until workers open them again; waiting requests fail with TaskLost.

        epoch  number of this return, which is in the names of later accumulators: no gradient of before finds one
        """
        known = {one.name: one for one in copy}
        self._accumulators.epoch = epoch
        with self._lock:
            names = {*self._runs, *known}
        for name in names:
            self._run(name).return_to(known.get(name, RunCopy(name, None, 0, None, 0)))

    def left(self, task: str) -> None:
        """Remove a task that left the cluster from all runs: it gives no more gradients."""
        for run in self._all():
            run.leave(task)

    def close(self, error: DflowError) -> None:
        """Answer all waiting requests with `error`."""
        for run in self._all():
            run.close(error)

    def _all(self) -> list[_AggregatedRun]:
        with self._lock:
            return list(self._runs.values())

    def _run(self, name: str) -> _AggregatedRun:
        with self._lock:
            if name not in self._runs:
                self._runs[name] = _AggregatedRun(name, self._task, self._accumulators, self._task.process)
            return self._runs[name]


def _check_counts(message: ProposeRounds | OpenRounds) -> None:
    if not (0 <= message.rounds <= MAX_COUNT and 1 <= message.wanted <= MAX_COUNT):
        raise WireError(f"{message.rounds} rounds {message.name[:64]!r} of {message.wanted} gradients")


class _Accumulators:
    """Reserves names of accumulators, each for one run at a time, and frees the accumulators."""

    def __init__(self, task: TaskServer) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._used: set[str] = set()
        #: Number of the last return to a snapshot.
        self.epoch = 0

    def use(self, name: str) -> str:
        """Reserve and return the name, after it the number of returns, and a further one while another run has it."""
        name += f"/{self.epoch}" if self.epoch else ""
        with self._lock:
            numbered = itertools.chain([name], (f"{name} {number}" for number in itertools.count(1)))
            free = next(one for one in numbered if one not in self._used)
            self._used.add(free)
            return free

    def release(self, name: str, key: str, others: Sequence[str], on_free: Callable[[], None]) -> None:
        """Free the accumulator, which is held under `key`, and those of the run on `others`; then its name.

        `on_free` is called once, from any thread, when the other tasks have answered or are lost. The name of an
        accumulator that another task may still hold is not used again.
        """
        reason, remedy = f"the run that used accumulator {name!r} has ended", "run it again"
        self._task.resources.forget(key, reason, remedy)
        left, is_free = {"", *others}, True

        def freed(task: str, reply: Outcome[Reply[Ok] | None]) -> None:
            nonlocal is_free
            with self._lock:
                if task not in left:
                    return
                left.remove(task)
                is_free = is_free and not isinstance(reply, BaseException)
                if left:
                    return
                if is_free:
                    self._used.discard(name)
            on_free()

        for task in others:
            message = ForgetState(accumulator_on(task, key), False, reason, remedy)
            self._task.soon(self._free_on, task, message, partial(freed, task))
        freed("", None)

    def _free_on(self, task: str, message: ForgetState, on_reply: OnReply[Ok]) -> None:
        try:
            self._task.peer(task).start(message, on_reply=on_reply)
        except DflowError as error:  # the task is gone, and its accumulator with it
            on_reply(error)


@dataclass(frozen=True)
class _MeanUpdate:
    """The accumulator of a run, and the arrays that are fed `before` and `after` its averages.

    opened  the message of the worker whose update this is
    """

    opened: OpenRounds
    accumulator: HeldAccumulator
    before: Sequence[Any]
    after: Sequence[Any]


@dataclass
class _AggregatedRun:
    name: str
    task: TaskServer
    accumulators: _Accumulators
    #: The process that has counted the rounds.
    process: str
    update: _MeanUpdate | None = None
    #: Name of the accumulator, and the key under which it is held.
    accumulator: str = ""
    key: str = ""
    #: The other tasks with accumulators of the run.
    others: tuple[str, ...] = ()
    _agreed: int | None = None
    _cancel_take: Cancel | None = None
    _asks: dict[int, tuple[Responder, Stoppable]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    #: Number of releases of accumulators that are under way, and the workers' leaves that wait for them.
    _freeing: int = 0
    _leaves: list[Responder] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rounds = Rounds(self.name)
        self._mailbox: Mailbox[Callable[[], Sequence[RoundCommand]]] = Mailbox(self._handle_all)
        self._lock = self._mailbox.lock

    def agree(self, message: ProposeRounds) -> RoundsAgreed:
        """Add the worker to the run; the answer has the numbers that the first worker proposed."""
        with self._lock:
            self._refuse_other(message.rounds)
            self._agreed = self._agreed or message.wanted
            if not self._rounds.is_over:
                if not self.accumulator:
                    self.accumulator, self.others = self.accumulators.use(message.accumulator), message.others
                self._handle(self._rounds.began, message.worker)
            return RoundsAgreed(self._agreed, self.accumulator, self._rounds.is_over, self.process)

    def open(self, update: _MeanUpdate, workers: Sequence[str]) -> None:
        """Open the run's next round with these workers, unless it is open.

        The first worker's update applies to all, until an update fails. Raises RemoteError for another number of
        rounds, TaskLost for an earlier accumulator.
        """
        message = update.opened
        with self._lock:
            self._refuse_other(message.rounds)
            self._refuse_earlier(message.accumulator)
            if not self._rounds.is_over:
                self.update, self.key = self.update or update, message.key
            opened = partial(self._rounds.open, is_elastic=message.is_elastic)
            self._handle(opened, message.rounds, message.wanted, workers)

    def copy(self) -> RunCopy:
        """Return a copy of the run; see `StepAggregator.copy`."""
        with self._lock:
            rounds = self._rounds
            # If no worker takes part, none may come back to do it.
            if rounds.is_half_done and rounds.taking_part:
                raise CheckpointError(
                    f"run {self.name!r}: expected round {rounds.done} on all tasks or none, got a failed update",
                    "wait until the round is done again",
                )
            counts = rounds.rounds, rounds.wanted, self._agreed, rounds.done
            return RunCopy(self.name, *counts, self.process, rounds.is_half_done)

    def return_to(self, copy: RunCopy) -> None:
        """Set the run to a copy, and free its accumulators; see `StepAggregator.return_to`."""
        with self._lock:
            # Closed first, so that the end of a waiting take is no failed update.
            counts = copy.done, copy.rounds, copy.wanted
            self._rounds = self._rounds.return_to(*counts, is_half_done=copy.is_half_done)
            self._agreed, self.update, self.process = copy.agreed, None, copy.process or self.process
            asks, self._asks = self._asks, {}
            self._free()
        for responder, timer in asks.values():
            timer.stop()
            self.task.soon(responder.fail, TaskLost(f"run {self.name!r} has returned to its round {copy.done}"))

    def leave(self, worker: str) -> None:
        """Remove a worker that has left the cluster; see `Rounds.leave`."""
        self._handle(self._rounds.leave, worker)

    def leave_and_answer(self, message: LeaveRounds, responder: Responder) -> None:
        """Remove a worker that stops taking part, and answer as soon as no accumulator is being freed."""
        with self._lock:
            is_of_this = message.accumulator == self.accumulator
            self._handle(self._rounds.leave, message.worker, message.done if is_of_this else -1)
        self._handle(self._left, [responder])

    def _left(self, leaves: Sequence[Responder], freed: int = 0) -> Sequence[RoundCommand]:
        self._freeing -= freed
        self._leaves += leaves
        if self._freeing == 0:
            for responder in self._leaves:
                self.task.soon(responder.reply, RoundsLeft())
            self._leaves = []
        return ()

    def _refuse_other(self, number: int) -> None:
        known = self._rounds.rounds
        if known is not None and known != number:
            raise RemoteError(
                f"run {self.name!r} has {known} rounds and was asked for with {number}; let all workers ask for the "
                "same number, or name another run"
            )

    def _refuse_earlier(self, accumulator: str) -> None:
        """Raise TaskLost for a worker that names another accumulator, from before a return or a restart."""
        if accumulator != self.accumulator and not self._rounds.is_over:
            text = f"run {self.name!r}: expected accumulator {self.accumulator!r}, got {accumulator!r}"
            raise TaskLost(f"{text}, which belongs to an earlier process or snapshot", "run it again")

    def ask(self, message: NextRound, responder: Responder) -> None:
        """Queue the worker's request, which is refused after its timeout; see `StepAggregator.ask`."""
        wait_s = message.timeout_s if math.isfinite(message.timeout_s) else math.inf
        with self._lock:
            # The number may be that of another opening here, and the worker has given no gradient for it.
            self._refuse_earlier(message.accumulator)
            ask = next(self._numbers)
            self._asks[ask] = responder, start_timer(wait_s, partial(self._handle, self._rounds.timed_out, ask))
            self._handle(self._rounds.ready, ask, message.worker, message.done)

    def close(self, error: DflowError) -> None:
        """Answer all waiting requests with `error`; later answers to them are ignored."""
        with self._lock:
            asks, self._asks = self._asks, {}
            leaves, self._leaves = self._leaves, []
        for responder, timer in asks.values():
            timer.stop()
            responder.fail(error)
        for responder in leaves:
            responder.fail(error)

    def _handle(self, decide: Callable[..., Sequence[RoundCommand]], *event: Any) -> None:
        """Carry out the decision about an event now, or after the current one if a command of that one caused it."""
        self._mailbox.post(partial(decide, *event))

    def _handle_all(self, decisions: deque[Callable[[], Sequence[RoundCommand]]]) -> None:
        while decisions:
            for command in decisions.popleft()():
                self._carry_out(command)
        if not self._rounds.is_open:
            # Free the feeds of its updates, which may be large.
            self.update = None

    def _carry_out(self, command: RoundCommand) -> None:
        match command:
            case OpenRound(number):
                self._take(number)
            case SetEnough(count):
                assert self.update is not None
                self.update.accumulator.set_enough(count)
            case SendReply(ask, message):
                responder = self._answered(ask)
                if responder is not None and isinstance(message, Failure):
                    self.task.soon(responder.fail, error_of(message, "rounds"))
                elif responder is not None:
                    self.task.soon(responder.reply, message)
            case FreeRun():
                self._free()

    def _answered(self, ask: int) -> Responder | None:
        """Remove and return the responder of a request; None when it was answered as the task closed."""
        waiting = self._asks.pop(ask, None)
        if waiting is None:
            return None
        responder, timer = waiting
        timer.stop()
        return responder

    def _take(self, number: int) -> None:
        """Have the accumulator average the gradients of the opening `number`, and `_taken` apply the average."""
        assert self.update is not None
        accumulator = self.update.accumulator
        step = ResourceOp(ops.accumulator_set_step.name)
        take = ResourceOp(ops.accumulator_take.name, self.update.opened.wanted, math.inf)
        try:
            accumulator.start(step, (number,), lambda _: None)
            self._cancel_take = accumulator.start(take, (), partial(self._taken, number))
        except Exception as error:
            self._updated(error)

    def _taken(self, number: int, mean: Outcome[Results]) -> None:
        """Start the update with the average, or fail it; runs on the thread that brought the last gradient."""
        with self._lock:
            if not self._rounds.is_open or self._rounds.number != number:
                return  # FreeRun has ended the take
            if isinstance(mean, BaseException):
                self._updated(mean)
                return
            self._handle(self._rounds.mean_taken)
            update, rounds = self.update, self._rounds
        assert update is not None
        self.task.soon(self._apply, update, mean, rounds, rounds.done)

    def _apply(self, update: _MeanUpdate, mean: Sequence[Any], rounds: Rounds, done: int) -> None:
        if not self.task.gate.enter(partial(self.task.soon, self._apply, update, mean, rounds, done)):
            return

        def ended(error: BaseException | None) -> None:
            self.task.gate.leave()
            if self._rounds is rounds:
                self._updated(error)

        if self._rounds is not rounds:  # the run has returned to an earlier round
            self.task.gate.leave()
            return

        # After a failed update, the next one is of the same round: tasks that applied the first skip it.
        # The worker may know of a return after which this task has got its state.
        epoch = max(self.accumulators.epoch, update.opened.epoch)
        round_ = StepOfRun(rounds_of(self.name, self.process), done, epoch=epoch, is_synchronous=True)
        try:
            self.task.starter.start_unattended(
                update.opened.handles, [*update.before, *mean, *update.after], ended, round_
            )
        except Exception as error:
            ended(error)

    def _updated(self, error: BaseException | None) -> None:
        if error is None:
            self._handle(self._rounds.updated)
            return
        is_lost = isinstance(error, TaskLost | TransportClosed)
        text = f"{type(error).__name__}: {error}"
        self._handle(self._rounds.updated, text, "TaskLost" if is_lost else "RemoteError")

    def _free(self) -> None:
        cancel, self._cancel_take = self._cancel_take, None
        if cancel is not None:
            cancel(StepCancelled(f"no worker takes part in {self.name!r}"))
        name, self.accumulator = self.accumulator, ""
        if name:
            self._freeing += 1
            freed = partial(self._handle, self._left, (), 1)
            self.accumulators.release(name, self.key or name, self.others, freed)
