"""The server of a task: it holds variables and runs the task's parts of steps.

Why: this class connects the pieces that decide (rendezvous), hold state (store), run (execute) and reach other tasks
(peers, transport); it decides nothing itself, and knows no strategy: each subject adds a `TaskPart`. A parameter server
is one of these alone. A worker has one to receive values, and runs its own part of each step through it.

Invariants:

- An error while handling a request is the answer to that request, and never ends the task.
- Reader threads dispatch messages: they begin steps, receive values, cancel, and run items of plans that do not block
  (see `plan_runs`). All else that reads or writes a variable, compiles or computes has a thread on demand.
- `RunPlan` is answered when the plan has ended, and no thread waits for that. The plan also ends by `CancelStep`, by
  the loss of the task that started the step, and by `close`.
- Slow work for one worker does not delay the steps of another: all work that may block has a thread on demand, and of
  the requests of one task at most a few run (`RequestQueues`). `threads.py` lists that work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, TypeAlias

import jax

from dflow.distributed.coordinator.variable_directory import REMEDY
from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.processor_use import processor_use
from dflow.distributed.observe.step_counts import StepCounts
from dflow.distributed.observe.task_observer import ON_THREADS, TaskObserver
from dflow.distributed.steps.peers import Peers
from dflow.distributed.steps.plan_registry import PlanRegistry
from dflow.distributed.steps.plan_runs import PlanRuns, owner_of
from dflow.distributed.steps.rendezvous import RendezvousStatistics, describe
from dflow.distributed.steps.step_gate import StepGate, prepared
from dflow.distributed.steps.step_starter import StepStarter
from dflow.distributed.steps.task_channel import WINDOW_BYTES, TaskChannel
from dflow.distributed.task.arrivals import (
    Answering,
    Arrival,
    Handled,
    RequestArrival,
    RequestTable,
    answer,
    answer_arrays,
    answer_run,
)
from dflow.distributed.task.member_gate import MemberGate
from dflow.distributed.task.request_queues import RequestQueues
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_resources import TaskResources
from dflow.distributed.task.threads import OnDemandThreads
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import Handler, Peer, Responder, Transport
from dflow.distributed.wire.codec import decode_array, decode_arrays, encode_arrays
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Arrays, Introduce, Ok
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.observing import (
    Dumped,
    DumpEvents,
    GetClock,
    TaskState,
    TaskUsage,
)
from dflow.distributed.wire.messages.plans import (
    CancelStep,
    ForgetResults,
    Registered,
    RegisterPlan,
    ReleasePlan,
    ReleaseStep,
    RunPlan,
)
from dflow.distributed.wire.messages.resources import CallResource, CreateResource, FailQueue, GetFed
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from dflow.distributed.wire.messages.transfers import Credit, Offer, Pull, Values
from dflow.distributed.wire.messages.variables import ForgetState, ReadVariables, WriteVariable
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.timers import Clock
from dflow.lowering.state.store import Store
from dflow.lowering.steps.recorder import Recorder
from dflow.lowering.steps.step_events import CONNECTION_LOST, ROSTER_CHANGED
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import SecurityError, StepCancelled, TaskLost


@dataclass(frozen=True)
class TaskSettings:
    """Timeouts and limits of a task.

    `wait_timeout_s`     longest wait of a receive for its value, in s
    `connect_timeout_s`  longest attempt to connect to another task whose process has ended, in s
    `reach_timeout_s`    longest wait for another task that may be paused or cut off: to resume a broken connection, or
                         to be answered by it; ends earlier when the task leaves, in s
    `window_bytes`       bytes that other tasks may push before they are taken; they keep and offer what exceeds them
    `snapshots`          folder for the task's parts of snapshots; None where it holds no state of others
    """

    wait_timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    reach_timeout_s: float = 600.0
    window_bytes: int = WINDOW_BYTES
    snapshots: Path | None = None


@dataclass(frozen=True)
class TaskStatistics:
    """Load of a task: number of plans registered, number running, and the state of its rendezvous."""

    plans: int
    running: int
    rendezvous: RendezvousStatistics


Handlers: TypeAlias = dict[type[Message], Callable[[Any, Any], object]]
#: Makes a part of a task from its server.
MakePart: TypeAlias = "Callable[[TaskServer], TaskPart]"


class TaskServer(Handler):
    """The task `name`, which listens at `address` as soon as it is constructed.

    parts            make its parts; they are called in this order
    process          identity of this process; state that the coordinator placed on another one is not created here
    threads, clock   executor for its work and clock of its timeouts, instead of the task's own; `close` ends both
    flights          writes its events to a file when a wait lasted too long, or on request
    on_stall         called with the reason when a wait lasted too long, so that other tasks dump their events too
    described        describes another task for an error; may take a second
    raises           what `Transport.listen` raises
    """

    #: The handlers of the messages that no part handles; see `TaskPart`.
    requests: ClassVar[RequestTable[TaskServer]] = RequestTable()
    notices: ClassVar[HandlerTable[TaskServer, Arrival, None]] = HandlerTable()

    def __init__(
        self,
        name: str,
        transport: Transport,
        parts: Sequence[MakePart],
        *,
        process: str = "",
        store: Store | None = None,
        address: str = LOCAL_ADDRESS,
        settings: TaskSettings | None = None,
        threads: Executor | None = None,
        clock: Clock | None = None,
        flights: FlightRecorder | None = None,
        on_stall: Callable[[str], None] = lambda why: None,
        described: Callable[[str], str] = short_task_name,
    ) -> None:
        self.name, self.process = name, process
        self._flights, self._on_stall = flights, on_stall
        self.recorder = flights.recorder if flights is not None else Recorder()
        self.store = store or Store()
        self.settings = settings = settings or TaskSettings()
        self._lock = threading.Lock()
        self._live: dict[str, TaskInfo] = {}
        #: The plans registered here.
        self.plans = PlanRegistry(name)
        #: The queues and accumulators that it holds for peers.
        self.resources = TaskResources(name, self.store)
        self.threads = threads or OnDemandThreads(f"dflow {name}")
        self._queues = RequestQueues(self.threads)
        #: Counts of the steps that this task has started.
        self.step_counts = StepCounts()
        self.observer = TaskObserver(self.recorder, self.state, self.usage)
        self.member_gate = MemberGate(name)
        #: Connections to the other tasks.
        self.peers = Peers(
            transport,
            name=name,
            handler=self,
            connect_timeout_s=settings.connect_timeout_s,
            reach_timeout_s=settings.reach_timeout_s,
            note=self.recorder.note,
            on_opened=self.member_gate.opened,
            submit=self.threads.submit,
        )
        #: Return the connection to another task, opened if needed; see `Peers.get`.
        self.peer = self.peers.get
        #: The channel over which this task's plans send and receive.
        self.channel = TaskChannel(
            name,
            self.peers,
            wait_timeout_s=settings.wait_timeout_s,
            clock=clock,
            recorder=self.recorder,
            on_stall=self.stalled,
            described=described,
            window_bytes=settings.window_bytes,
        )
        #: Return the messages, values and bytes that this task has sent since its start, per edge.
        self.traffic = self.channel.traffic
        #: The parts of steps that run here.
        self.runs = PlanRuns(name, self.store, self.channel, self.recorder, self.threads)
        self.starter = StepStarter(name, self.peers, self.plans, self.runs)
        #: Held closed while the state of all tasks is captured.
        self.gate = StepGate(name)
        self._requests: Handlers = {}
        self._notices: Handlers = {}
        self.parts: tuple[TaskPart, ...] = tuple(make(self) for make in parts)
        self._add_handlers(self)
        for part in self.parts:
            self._add_handlers(part)
        self._listener = transport.listen(address, name=name, handler=self, resume_s=settings.reach_timeout_s)
        #: Address that other tasks connect to.
        self.address = self._listener.address

    def _add_handlers(self, part: TaskServer | TaskPart) -> None:
        for kind, handle in part.notices.handlers.items():
            self._notices[kind] = MethodType(handle, part)
        for kind, request in part.requests.handlers.items():
            method = MethodType(request, part)
            is_queued = part.requests.threaded.get(kind)
            self._requests[kind] = method if is_queued is None else partial(self._answer_on_thread, method, is_queued)

    def doing(self) -> str:
        """Describe the oldest part of a step that runs here, and its longest wait, or what is compiled; else empty."""
        running = self.runs.running()
        if not running:
            return prepared()
        waits = self.channel.oldest_wait()
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        return f"{describe(running[0])}{more}" + (f": {waits}" if waits else "")

    def stalled(self, why: str) -> str:
        """Dump the newest events here and call `on_stall`; return a sentence with the file, if any, to end an error."""
        path = self._flights.dump(why) if self._flights is not None else ""
        self._on_stall(why)
        return f"\n  the last events of {short_task_name(self.name)} are in {path}" if path else ""

    def state(self) -> TaskState:
        """Counters and present load of this task, for tools that watch it."""
        steps, held = self.step_counts.totals(), self.statistics()
        return TaskState(
            steps=steps.ended,
            step_s=steps.mean_s,
            parts=self.runs.counts.totals().ended,
            running=held.running,
            waiting=held.rendezvous.waiters,
            held=held.rendezvous.values,
            depths=self.resources.depths(),
        )

    def usage(self) -> TaskUsage:
        """Processor time of this process, and values sent by this task, since their start."""
        sent = self.traffic()
        return TaskUsage(
            *processor_use(),
            messages=sum(entry.messages for entry in sent),
            values=sum(entry.values for entry in sent),
            size_bytes=sum(entry.size_bytes for entry in sent),
            updates=self.runs.updates,
            missed=self.runs.missed,
        )

    def statistics(self) -> TaskStatistics:
        """Number of plans, of running parts, and the state of the rendezvous."""
        return TaskStatistics(len(self.plans), len(self.runs.running()), self.channel.statistics())

    # The other tasks.

    def roster_changed(self, roster: Roster) -> None:
        """Apply a new roster: call `task_left` for tasks that left or were started again, and close their connections.

        Introduces this task to the others, and delivers or refuses held messages.
        """
        live = {info.task: info for info in roster.tasks if info.left_at_s is None}
        gone = {info.task: info for info in roster.tasks if info.task not in live}
        with self._lock:
            before, self._live = self._live, live
        self.channel.set_senders(len(live) - 1)
        self.member_gate.roster_changed(roster)
        self.recorder.note(ROSTER_CHANGED, None, "", f"version {roster.version}, {len(live)} live, {len(gone)} left")
        for task, info in gone.items():
            # Other tasks that left were handled with an earlier roster, and have started nothing since.
            if task != self.name and (task in before or not self.channel.has_left(task)):
                self.task_left(task, info.left or "no reason given")
        # Only after their cancelled steps were answered, over connections that end here.
        left = {task: info.left or "no reason given" for task, info in gone.items()}
        processes = {task: info.process for task, info in live.items()}
        self.peers.set_addresses({task: info.address for task, info in live.items()}, left, processes)
        if self.name in live:
            self.peers.introduce(self.member_gate.introduction(live[self.name]))
        for task, info in live.items():
            if task in before and before[task].life != info.life:
                self.task_left(task, "it was started again")
            self.channel.task_joined(task)
        # Held messages of new members, only now: before `task_joined` the channel may drop values in their steps.
        self.member_gate.admit()

    def task_left(self, task: str, why: str) -> None:
        """Cancel the steps that a lost task started, fail waits for its values, and call `left` of each part."""
        error = TaskLost(f"{task} has left the cluster: {why}")
        for step in self.channel.task_left(task, error):
            self.runs.cancel(step, error)
        for part in self.parts:
            part.left(task)

    def close(self) -> None:
        """Cancel the running parts of steps, stop listening and close every connection; a second call does nothing.

        Refuses or drops the requests that wait, and lets steps that wait for the gate begin, to fail there.
        """
        for step in self.runs.steps():
            self.runs.cancel(step, TaskLost(f"{self.name} has left the cluster in {describe(step)}: it closes"))
        closes = TaskLost(f"{self.name} has left the cluster: it closes")
        self.gate.open()
        for part in self.parts:
            part.close(closes)
        self.plans.compiling.close(closes)
        self._queues.close()
        self._listener.close()
        self.peers.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.channel.close()

    # Messages; see `transport.base.Handler`.

    def on_call(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        """Handle a request; see `MemberGate` for those from a connection that is not yet a member's.

        raises  NotImplementedError for an unknown kind; SecurityError for a sender that speaks for another task
        """
        arrival = RequestArrival(peer, payload, responder)
        if peer in self.member_gate.members or message.is_open:
            self._handle(self._requests, message, arrival)
        else:
            self.member_gate.take(peer, partial(self._handle_admitted, message, arrival), responder.fail)

    def _handle_admitted(self, message: Message, arrival: RequestArrival) -> None:
        try:
            self._handle(self._requests, message, arrival)
        except Exception as error:
            arrival.responder.fail(error)

    def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
        """Handle a notification as `on_call` does a request, without an answer."""
        arrival = Arrival(peer, payload)
        if peer in self.member_gate.members:
            self._handle(self._notices, message, arrival)
        else:
            handle = partial(self._handle, self._notices, message, arrival)
            self.member_gate.take(peer, handle, partial(self._refused, peer, message))

    def _refused(self, peer: Peer, message: Message, error: TaskLost) -> None:
        # A value of the step may come when the task is back, and nothing would end the step then.
        if isinstance(message, CancelStep) and message.origin == peer.name and self.member_gate.may_come_back(peer):
            self.channel.abort(StepId(message.origin, message.step), error)

    def _handle(self, handlers: Handlers, message: Message, arrival: Arrival) -> None:
        handle = handlers.get(type(message))
        if handle is None:
            kind = type(message).__name__
            if handlers is self._notices and type(message) in self._requests:
                raise NotImplementedError(f"{kind} is a request; use `call`")
            raise NotImplementedError(f"a task does not {'answer' if handlers is self._requests else 'take'} {kind}")
        if message.speaker and (whose := getattr(message, message.speaker)) != arrival.peer.name:
            kind = type(message).__name__
            raise SecurityError(f"{arrival.peer.name} may not speak for {whose}, as this {kind} does")
        handle(message, arrival)

    def _answer_on_thread(self, handle: Answering, is_queued: bool, message: Message, arrival: RequestArrival) -> None:
        submit = partial(self._queues.submit, arrival.peer.name) if is_queued else self.threads.submit
        submit(answer, handle, message, arrival, self.member_gate.refuse_departed)

    def on_close(self, peer: Peer, reason: str) -> None:
        """End the waits for values from a peer, since some may be lost with the connection; drop its held messages."""
        self.member_gate.closed(peer)
        self.recorder.note(CONNECTION_LOST, None, peer.name, reason)
        error = TaskLost(f"the connection between {self.name} and {peer.name} has ended: {reason}")
        self.channel.connection_lost(peer, error)

    def soon(self, work: Callable[..., object], *args: Any) -> None:
        """Run work on a thread; does nothing once the task is closed, or the process ends.

        raises  RuntimeError if the system starts no more threads
        """
        try:
            self.threads.submit(work, *args)
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise

    # Requests handled on the reader thread.

    @requests.handles(Introduce)
    def _introduce(self, message: Introduce, arrival: RequestArrival) -> None:
        self.member_gate.introduced(arrival.peer, message)
        arrival.responder.reply(Ok())

    @requests.handles(RunPlan)
    def _run_plan(self, message: RunPlan, arrival: RequestArrival) -> None:
        self.peers.adopt(arrival.peer)
        plan, step = self.plans.get(message.handle), StepId(message.origin, message.step)
        self.runs.run(
            plan,
            step,
            (),
            partial(answer_run, arrival.responder),
            ahead=message.ahead,
            of=message.of,
        )

    @requests.handles(CancelStep)
    def _cancel_step(self, message: CancelStep, arrival: RequestArrival) -> None:
        self._cancel_part(message, arrival)
        arrival.responder.reply(Ok())

    @requests.handles(GetClock)
    def _get_clock(self, message: GetClock, arrival: RequestArrival) -> None:
        arrival.responder.reply(*self.observer.answer(message))

    # Requests handled on threads.

    @requests.queued(ReadVariables)
    def _read_variables(self, message: ReadVariables, arrival: RequestArrival) -> Handled:
        infos, data = encode_arrays(self.store.views(message.keys))
        return Arrays(infos), data

    @requests.queued(WriteVariable)
    def _write_variable(self, message: WriteVariable, arrival: RequestArrival) -> None:
        self.store.write(message.name, jax.device_put(decode_array(message.dtype, message.shape, arrival.payload)))

    @requests.queued(ForgetState)
    def _forget(self, message: ForgetState, arrival: RequestArrival) -> None:
        held = self.store.table if message.is_variable else self.resources
        held.forget(message.key, message.reason, message.remedy)

    @requests.queued(CreateResource)
    def _create_resource(self, message: CreateResource, arrival: RequestArrival) -> None:
        self.refuse_for_another_process(message.name, message.process)
        self.resources.create(message)

    @requests.queued(CallResource)
    def _call_resource(self, message: CallResource, arrival: RequestArrival) -> None:
        operands = decode_arrays(message.operands, arrival.payload)
        executable = self.resources.executable(message)
        step = StepId(message.origin, message.step)
        self.runs.run(executable, step, operands, partial(answer_arrays, arrival.responder))

    @requests.queued(RegisterPlan)
    def _register_plan(self, message: RegisterPlan, arrival: RequestArrival) -> Registered:
        handle, missing = self.plans.register(message, arrival.payload, arrival.peer.name)
        return Registered(handle, missing)

    # Requests of tools.

    @requests.on_own_thread(DumpEvents)
    def _dump_events(self, message: DumpEvents, arrival: RequestArrival) -> Handled:
        return Dumped(self._flights.dump(message.why) if self._flights is not None else "")

    # Notices.

    @notices.handles(CancelStep)
    def _cancel_part(self, message: CancelStep, arrival: Arrival) -> None:
        step = StepId(message.origin, message.step)
        self.runs.cancel(step, StepCancelled(f"{describe(step)} was cancelled: {message.reason}"))

    @notices.handles(ReleaseStep)
    def _release_step(self, message: ReleaseStep, arrival: Arrival) -> None:
        self.runs.release(StepId(message.origin, message.step), message.of)

    @notices.handles(ForgetResults)
    def _forget_results(self, message: ForgetResults, arrival: Arrival) -> None:
        owner = owner_of(StepId(message.origin, message.first))
        self.store.applied.end_steps(message.run, owner, message.unfinished)

    def refuse_for_another_process(self, name: str, process: str) -> None:
        """Raise TaskLost unless `process`, where the coordinator placed `name`, is this process or empty."""
        if process not in ("", self.process):
            text = f"{name!r} is placed on an earlier process of {short_task_name(self.name)}"
            raise TaskLost(f"{text}, which has been started again since", REMEDY)


# The handlers that only call one piece of the task.
TaskServer.requests.queued(GetFed)(lambda task, message, _: task.resources.fed(message))
TaskServer.requests.queued(FailQueue)(lambda task, message, _: task.resources.fail_queue(message))
for _observation in ON_THREADS:
    TaskServer.requests.on_own_thread(_observation)(lambda task, message, _: task.observer.answer(message))
TaskServer.notices.handles(Values)(
    lambda task, message, arrival: task.channel.arrived(message, arrival.payload, arrival.peer)
)
TaskServer.notices.handles(Offer)(lambda task, message, arrival: task.channel.offered(message, arrival.peer))
TaskServer.notices.handles(Pull)(lambda task, message, arrival: task.channel.pulled(message, arrival.peer))
TaskServer.notices.handles(Credit)(lambda task, message, arrival: task.channel.credited(message, arrival.peer))
TaskServer.notices.handles(ReleasePlan)(lambda task, message, _: task.plans.release(message.handle))
