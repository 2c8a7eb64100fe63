"""The server of a task: it holds variables and runs the task's parts of steps.

Why: this class connects the pieces that decide (rendezvous), hold state (store), run (execute) and reach other tasks
(peers, transport); it decides nothing itself. A parameter server is one of these alone. A worker has one to receive
values, and runs its own part of each step through it.

Invariants:

- An error while handling a request is the answer to that request, and never ends the task.
- Reader threads dispatch messages: they begin steps, receive values, cancel, and run the quick items of a plan (see
  `plan_runs`). The task's pool does all else that reads or writes a variable, compiles or computes.
- `RunPlan` is answered when the plan has ended, and no thread waits for that. The plan also ends by `CancelStep`, by
  the loss of the task that started the step, and by `close`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.step_counts import StepCounts
from dflow.distributed.observe.task_observer import Observation, TaskObserver
from dflow.distributed.steps.deadlines import Deadlines, MakeDeadlines
from dflow.distributed.steps.peers import Peers
from dflow.distributed.steps.plan_registry import PlanRegistry
from dflow.distributed.steps.plan_runs import PlanRuns
from dflow.distributed.steps.rendezvous import RendezvousStatistics, describe
from dflow.distributed.steps.task_channel import WINDOW_BYTES, TaskChannel
from dflow.distributed.steps.task_initiated_steps import TaskInitiatedSteps
from dflow.distributed.task.member_gate import Arrived, MemberGate
from dflow.distributed.task.step_aggregator import StepAggregator
from dflow.distributed.task.task_checkpoints import TaskCheckpoints
from dflow.distributed.task.task_resources import TaskResources
from dflow.distributed.task.variable_creation import VariableCreation
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import Peer, Responder, Transport
from dflow.distributed.wire.array_lists import decode_arrays, encode_arrays
from dflow.distributed.wire.codec import decode_array
from dflow.distributed.wire.messages import (
    AnyMessage,
    Arrays,
    CallResource,
    CancelStep,
    CreateResource,
    CreateVariables,
    Credit,
    Dumped,
    DumpEvents,
    EdgeTraffic,
    EndRestore,
    ForgetState,
    GetClock,
    GetTaskState,
    Introduce,
    LeaveRounds,
    NextRound,
    Offer,
    Ok,
    OpenRounds,
    ProposeRounds,
    Pull,
    ReadCheckpoint,
    ReadVariables,
    Registered,
    RegisterPlan,
    ReleasePlan,
    Roster,
    RunPlan,
    SaveVariables,
    StartTrace,
    StopTrace,
    TaskInfo,
    TaskState,
    Tensor,
    Wanted,
    WriteVariable,
)
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.state.store import Store
from dflow.lowering.steps.execute import Outcome
from dflow.lowering.steps.plan import Plan
from dflow.lowering.steps.recorder import (
    CONNECTION_LOST,
    ROSTER_CHANGED,
    Recorder,
)
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import (
    SecurityError,
    StepCancelled,
    TaskLost,
    WireError,
)


@dataclass(frozen=True)
class TaskSettings:
    """Timeouts and limits of a task.

    `wait_timeout_s`     longest wait of a receive for its value, in s
    `connect_timeout_s`  longest attempt to connect to another task, in s
    `threads`            number of plan items and requests that run concurrently
    `window_bytes`       bytes that another task may push before they are taken; it keeps and offers what exceeds them
    """

    wait_timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    threads: int = 8
    window_bytes: int = WINDOW_BYTES


@dataclass(frozen=True)
class TaskStatistics:
    """Load of a task: number of plans registered, number running, and the state of its rendezvous."""

    plans: int
    running: int
    rendezvous: RendezvousStatistics


class TaskServer:
    """The task `name`, which listens at `address` as soon as it is constructed.

    process          identity of this process; state that the coordinator placed on another one is not created here
    pool, deadlines  executor for its work and scheduler of its timeouts, instead of threads of the task
    recorder         recorder of its events
    flights          writes the events to a file when a wait lasted too long, or on request
    on_stall         called with the reason when a wait lasted too long, so that other tasks dump their events too
    described        describes another task for an error; may take a second
    raises           what `Transport.listen` raises
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        process: str = "",
        store: Store | None = None,
        address: str = LOCAL_ADDRESS,
        settings: TaskSettings | None = None,
        pool: Executor | None = None,
        deadlines: MakeDeadlines = Deadlines,
        recorder: Recorder | None = None,
        flights: FlightRecorder | None = None,
        on_stall: Callable[[str], None] = lambda why: None,
        described: Callable[[str], str] = short_task_name,
    ) -> None:
        self.name, self._process = name, process
        self._flights, self._on_stall = flights, on_stall
        self.recorder = recorder or Recorder()
        self.store = store or Store()
        settings = settings or TaskSettings()
        self._lock = threading.Lock()
        self._live: dict[str, TaskInfo] = {}
        self._plans = PlanRegistry(name)
        self._resources = TaskResources(name, self.store)
        self._creation = VariableCreation(self.store, self._plans.program, self._refuse_for_another_process)
        self._pool = pool or ThreadPoolExecutor(settings.threads, thread_name_prefix=f"dflow {name}")
        #: Counts of the steps that this task has started.
        self.steps = StepCounts()
        self.observer = TaskObserver(self.recorder, self.state)
        self._gate = MemberGate(name)
        self._peers = Peers(
            transport,
            name=name,
            handler=self,
            connect_timeout_s=settings.connect_timeout_s,
            note=self.recorder.note,
            on_opened=self._gate.opened,
        )
        self._channel = TaskChannel(
            name,
            self._peers,
            wait_timeout_s=settings.wait_timeout_s,
            deadlines=deadlines,
            recorder=self.recorder,
            on_stall=self.stalled,
            described=described,
            window_bytes=settings.window_bytes,
        )
        self._rounds = StepAggregator(
            name, self._resources, TaskInitiatedSteps(self).start, self._soon, has_left=self._channel.has_left
        )
        self._checkpoints = TaskCheckpoints(name, self.store, self._channel.has_left)
        self._runs = PlanRuns(name, self.store, self._channel, self.recorder, self._pool)
        self._listener = transport.listen(address, name=name, handler=self)

    @property
    def address(self) -> str:
        """Address that other tasks connect to."""
        return self._listener.address

    @property
    def channel(self) -> TaskChannel:
        """The channel over which this task's plans send and receive."""
        return self._channel

    @property
    def parts(self) -> StepCounts:
        """Counts of the parts of steps that this task has run, by outcome."""
        return self._runs.counts

    def peer(self, task: str) -> Peer:
        """Return the connection to another task, opened if needed; see `Peers.get`."""
        return self._peers.get(task)

    def taken_in(self) -> dict[str, int]:
        """Bytes of values received since the start, by sending task."""
        return self._channel.taken_in()

    def connections(self) -> int:
        """Number of open connections to other tasks."""
        return self._peers.open_connections()

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """Values and bytes that this task has sent since its start, per edge."""
        return self._channel.traffic()

    def steps_ended(self) -> int:
        """Number of parts of steps that have ended here, with or without an error."""
        return self._runs.ended

    def doing(self) -> str:
        """Describe the oldest part of a step that runs here, and its longest wait; empty when none runs."""
        running = self._runs.running()
        if not running:
            return ""
        waits = self._channel.oldest_wait()
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        return f"{describe(running[0])}{more}" + (f": {waits}" if waits else "")

    def stalled(self, why: str) -> str:
        """Dump the newest events after a timeout; return the name of the file, as the end of an error."""
        path = self._flights.dump(why) if self._flights is not None else ""
        self._on_stall(why)
        return f"\n  the last events of {short_task_name(self.name)} are in {path}" if path else ""

    def state(self) -> TaskState:
        """Counters and present load of this task, for tools that watch it."""
        steps, held = self.steps.totals(), self.statistics()
        return TaskState(
            steps=steps.done + sum(steps.errors.values()),
            step_s=steps.mean_s,
            parts=self.steps_ended(),
            running=held.running,
            waiting=held.rendezvous.waiters,
            held=held.rendezvous.values,
            depths=self._resources.depths(),
        )

    def statistics(self) -> TaskStatistics:
        """Number of plans, of running parts, and the state of the rendezvous."""
        return TaskStatistics(len(self._plans), len(self._runs.running()), self._channel.statistics())

    # Running plans.

    def register(self, plan: Plan, programs: Sequence[Program]) -> int:
        """Keep a plan of this task and return its handle. Raises WireError if plan and programs do not match."""
        return self._plans.add(plan, programs)

    def release(self, handle: int) -> None:
        """Undo one registration of a plan; the last one drops the plan."""
        self._plans.release(handle)

    def run(self, handle: int, step: StepId, feeds: Sequence[Any], on_done: Callable[[Outcome], None]) -> None:
        """Run a registered plan as this task's part of `step`; `on_done` is called once, from any thread.

        A task runs at most one plan per step.

        raises  InternalError if no such plan is registered, or one runs in this step; StepCancelled if the step has
                ended here; TaskLost if the task that started it has left
        """
        self._runs.run(self._plans.get(handle), step, feeds, on_done)

    def count_steps_from(self, number: int) -> None:
        """Number this task's steps from `number` on; messages for lower ones, of its earlier lives, are dropped."""
        self._channel.count_from(number)

    def cancel(self, step: StepId, error: BaseException) -> None:
        """End this task's part of `step` with `error`, now or as soon as it begins."""
        self._runs.cancel(step, error)

    # The other tasks.

    def roster_changed(self, roster: Roster) -> None:
        """Apply a new roster. Waits on tasks that left fail now and are not retried."""
        live = {info.task: info for info in roster.tasks if info.left_at_s is None}
        gone = {info.task: info for info in roster.tasks if info.task not in live}
        with self._lock:
            before, self._live = self._live, live
        self._gate.roster_changed(roster)
        self.recorder.note(ROSTER_CHANGED, None, "", f"version {roster.version}, {len(live)} live, {len(gone)} left")
        for task, info in gone.items():
            # Other tasks that left were handled with an earlier roster, and have started nothing since.
            if task != self.name and (task in before or not self._channel.has_left(task)):
                self.task_left(task, info.left or "no reason given")
        # Only after their cancelled steps were answered, over connections that end here.
        left = {task: info.left or "no reason given" for task, info in gone.items()}
        self._peers.set_addresses({task: info.address for task, info in live.items()}, left)
        if self.name in live:
            self._peers.set_life(live[self.name].life)
        for task, info in live.items():
            if task in before and _life(before[task]) != _life(info):
                self.task_left(task, "it has started anew")
            self._channel.task_joined(task)
        # Held messages of new members, only now: before `task_joined` the channel may drop values in their steps.
        self._gate.admit()

    def task_left(self, task: str, why: str) -> None:
        """Handle the loss of a task: cancel the steps it started, and fail waits for its values with `TaskLost`."""
        error = TaskLost(f"{task} has left the cluster: {why}")
        for step in self._channel.task_left(task, error):
            self.cancel(step, error)
        self._rounds.task_left(task)
        self._checkpoints.task_left(task)

    def close(self) -> None:
        """Cancel the running parts, stop listening and close every connection; a second call does nothing."""
        for step in self._runs.running():
            self.cancel(step, TaskLost(f"{self.name} has left the cluster in {describe(step)}: it closes"))
        self._rounds.close(TaskLost(f"{self.name} has left the cluster: it closes"))
        self._listener.close()
        self._peers.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._channel.close()

    # Messages; see `transport.base.Handler`.

    def on_call(self, peer: Peer, message: AnyMessage, payload: memoryview, responder: Responder) -> None:
        """Handle a request. Connections of non-members may only make the requests of tools (`_LOOKS_ON`)."""
        if isinstance(message, Introduce):
            self._gate.introduced(peer, message.life)
            responder.reply(Ok())
        elif peer in self._gate.members or isinstance(message, _LOOKS_ON):
            self._take_call(peer, message, payload, responder)
        else:
            take = partial(self._take_call, peer, message, payload, responder)
            self._gate.take(peer, Arrived(partial(_answered, take, responder), responder.fail))

    def _take_call(self, peer: Peer, message: AnyMessage, payload: memoryview, responder: Responder) -> None:
        _refuse_for_another(peer, message)
        match message:
            case RunPlan(handle, origin, number):
                self._peers.adopt(peer)
                self.run(handle, StepId(origin, number), (), partial(_answer_run, responder))
            case CancelStep():
                self._cancel_as_told(message)
                responder.reply(Ok())
            case NextRound():
                self._pool.submit(self._rounds.ask, message, responder)
            case CallResource():
                self._pool.submit(self._call_resource, message, payload, responder)
            case GetClock():
                responder.reply(*self.observer.answer(message))
            case StartTrace() | StopTrace() | GetTaskState():
                _on_own_thread(self._observe, message, responder)
            case DumpEvents(why):
                _on_own_thread(self._dump, why, responder)
            case _:
                self._pool.submit(self._answer, message, payload, responder)

    def on_notify(self, peer: Peer, message: AnyMessage, payload: memoryview) -> None:
        """Handle a notification; see `MemberGate` for those from a connection that is not yet a member's."""
        if peer in self._gate.members:
            self._take_notice(peer, message, payload)
        else:
            take = partial(self._take_notice, peer, message, payload)
            self._gate.take(peer, Arrived(take, lambda error: None))

    def _take_notice(self, peer: Peer, message: AnyMessage, payload: memoryview) -> None:
        match message:
            case Tensor():
                self._take_in(peer, message, payload)
            case Offer():
                self._channel.offered(message, peer)
            case Pull():
                self._channel.pulled(message, peer)
            case Credit():
                self._channel.credited(message, peer)
            case CancelStep():
                _refuse_for_another(peer, message)
                self._cancel_as_told(message)
            case ReleasePlan(handle):
                self.release(handle)
            case _:
                raise NotImplementedError(f"{type(message).__name__} is a request; use `call`")

    def on_close(self, peer: Peer, reason: str) -> None:
        """End the waits for values from a peer, since some may be lost with the connection."""
        self._gate.closed(peer)
        self.recorder.note(CONNECTION_LOST, None, peer.name, reason)
        error = TaskLost(f"the connection between {self.name} and {peer.name} has ended: {reason}")
        self._channel.connection_lost(peer.name, error)

    def _soon(self, work: Callable[..., object], *args: Any) -> None:
        """Submit work to the pool; ignored once the task is closed."""
        with contextlib.suppress(RuntimeError):
            self._pool.submit(work, *args)

    def _take_in(self, peer: Peer, message: Tensor, payload: memoryview) -> None:
        """Pass a received value to its receiver. A malformed value cancels its step, since no other will come."""
        try:
            self._channel.arrived(message, payload, peer)
        except WireError as error:
            self.cancel(StepId(message.origin, message.step), error)
            raise

    def _cancel_as_told(self, message: CancelStep) -> None:
        step = StepId(message.origin, message.step)
        self.cancel(step, StepCancelled(f"{describe(step)} was cancelled: {message.reason}"))

    def _observe(self, message: Observation, responder: Responder) -> None:
        try:
            responder.reply(*self.observer.answer(message))
        except Exception as error:
            responder.fail(error)

    def _dump(self, why: str, responder: Responder) -> None:
        responder.reply(Dumped(self._flights.dump(why) if self._flights is not None else ""))

    def _call_resource(self, message: CallResource, payload: memoryview, responder: Responder) -> None:
        try:
            operands = decode_arrays(message.operands, payload)
            executable = self._resources.executable(message)
            step = StepId(message.origin, message.step)
            self._runs.run(executable, step, operands, partial(_answer_arrays, responder))
        except Exception as error:
            responder.fail(error)

    def _answer(self, message: AnyMessage, payload: memoryview, responder: Responder) -> None:
        try:
            answer, data = self._carry_out(message, payload)
        except Exception as error:
            responder.fail(error)
        else:
            responder.reply(answer, data)

    def _carry_out(self, message: AnyMessage, payload: memoryview) -> tuple[AnyMessage, memoryview]:
        match message:
            case CreateVariables():
                return self._creation.create(message, payload), _NOTHING
            case ReadVariables(keys):
                infos, data = encode_arrays(self.store.views(keys))
                return Arrays(infos), memoryview(data)
            case WriteVariable(name, dtype, shape):
                self.store.write(name, _on_device(dtype, shape, payload))
                return Ok(), _NOTHING
            case SaveVariables():
                self._checkpoints.save(message)
                return Ok(), _NOTHING
            case ReadCheckpoint():
                self._checkpoints.read(message)
                return Ok(), _NOTHING
            case EndRestore():
                self._checkpoints.end(message)
                return Ok(), _NOTHING
            case CreateResource():
                self._refuse_for_another_process(message.name, message.process)
                self._resources.create(message)
                return Ok(), _NOTHING
            case ProposeRounds():
                return self._rounds.agree(message), _NOTHING
            case OpenRounds():
                self._rounds.open(message, payload)
                return Ok(), _NOTHING
            case LeaveRounds():
                self._rounds.leave(message)
                return Ok(), _NOTHING
            case ForgetState():
                self._forget(message)
                return Ok(), _NOTHING
            case RegisterPlan() if wanted := self._plans.wanted(message):
                return Wanted(wanted), _NOTHING
            case RegisterPlan():
                return Registered(self._plans.add_encoded(message, payload)), _NOTHING
            case _:
                raise NotImplementedError(f"a task does not answer {type(message).__name__}")

    def _forget(self, message: ForgetState) -> None:
        if message.is_variable:
            self.store.forget(message.key, message.reason, message.remedy)
        else:
            self._resources.forget(message.key, message.reason, message.remedy)

    def _refuse_for_another_process(self, name: str, process: str) -> None:
        """Raise TaskLost when the coordinator placed `name` on another process of this task."""
        if process not in ("", self._process):
            raise TaskLost(
                f"{name!r} is placed on an earlier process of {short_task_name(self.name)}, which has been started "
                "again since\n  start the whole cluster again: what a parameter task held is not restored yet"
            )


_NOTHING = memoryview(b"")


def _life(info: TaskInfo) -> tuple[str, float]:
    """Identity of a task's life, which differs from earlier tasks of the same name."""
    return info.incarnation, info.joined_at_s


#: The field of a message that names the task it acts for.
_SPEAKERS: Mapping[type[AnyMessage], str] = {
    RunPlan: "origin",
    CancelStep: "origin",
    CallResource: "origin",
    ReadCheckpoint: "origin",
    EndRestore: "origin",
    ProposeRounds: "worker",
    NextRound: "worker",
    LeaveRounds: "worker",
}


def _refuse_for_another(peer: Peer, message: AnyMessage) -> None:
    """Raise SecurityError when a task acts for another one."""
    field = _SPEAKERS.get(type(message))
    if field is not None and (whose := getattr(message, field)) != peer.name:
        raise SecurityError(f"{peer.name} may not speak for {whose}, as this {type(message).__name__} does")


#: Requests that tools, which are in no roster, may make.
_LOOKS_ON = (GetClock, StartTrace, StopTrace, GetTaskState, DumpEvents)


def _answered(take: Callable[[], None], responder: Responder) -> None:
    """Handle a request that was held, outside of its reader thread; an error is its answer."""
    try:
        take()
    except Exception as error:
        responder.fail(error)


def _on_own_thread(work: Callable[..., None], *arguments: Any) -> None:
    """Run on a new thread, not in the pool: the pool may be stuck, and these requests are made to find out."""
    threading.Thread(target=work, args=arguments, name="dflow look", daemon=True).start()


def _answer_run(responder: Responder, outcome: Outcome) -> None:
    if isinstance(outcome, BaseException):
        responder.fail(outcome)
    else:
        responder.reply(Ok())


def _answer_arrays(responder: Responder, outcome: Outcome) -> None:
    if isinstance(outcome, BaseException):
        responder.fail(outcome)
        return
    try:
        infos, payload = encode_arrays(outcome)
    except Exception as error:
        responder.fail(error)
    else:
        responder.reply(Arrays(infos), payload)


def _on_device(dtype: str, shape: tuple[int, ...], payload: memoryview) -> jax.Array:
    value: jax.Array = jax.device_put(decode_array(dtype, shape, payload))
    return value
