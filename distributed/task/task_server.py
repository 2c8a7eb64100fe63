"""The server of a task: it holds variables and runs the task's parts of steps.

Why: this class connects the pieces that decide (rendezvous), hold state (store), run (execute) and reach other tasks
(peers, transport); it decides nothing itself. A parameter server is one of these alone. A worker has one to receive
values, and runs its own part of each step through it.

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

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from dflow.distributed.asynchronous.staleness_bounds import StalenessBounds
from dflow.distributed.asynchronous.staleness_messages import BeginStep, EndStep
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
from dflow.distributed.synchronous.round_messages import LeaveRounds, NextRound, OpenRounds, ProposeRounds
from dflow.distributed.synchronous.step_aggregator import StepAggregator
from dflow.distributed.task.arrivals import (
    Arrival,
    Handled,
    RequestArrival,
    RequestTable,
    answer_arrays,
    answer_run,
)
from dflow.distributed.task.member_gate import Arrived, MemberGate
from dflow.distributed.task.request_queues import RequestQueues
from dflow.distributed.task.task_checkpoints import CHECKPOINT_REQUESTS, TaskCheckpoints
from dflow.distributed.task.task_resources import TaskResources
from dflow.distributed.task.threads import OnDemandThreads
from dflow.distributed.task.variable_creation import VariableCreation
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import Peer, Responder, Transport
from dflow.distributed.wire.codec import decode_array, decode_arrays, encode_arrays
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.connection import Arrays, Introduce, Ok
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
    Wanted,
)
from dflow.distributed.wire.messages.resources import CallResource, CreateResource, FailQueue, ForgetFed, GetFed
from dflow.distributed.wire.messages.roster import EdgeTraffic, Roster, TaskInfo
from dflow.distributed.wire.messages.transfers import Credit, Offer, Pull, PulledValues, Values
from dflow.distributed.wire.messages.variables import CreateVariables, ForgetState, ReadVariables, WriteVariable
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
    """

    wait_timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    reach_timeout_s: float = 600.0
    window_bytes: int = WINDOW_BYTES


@dataclass(frozen=True)
class TaskStatistics:
    """Load of a task: number of plans registered, number running, and the state of its rendezvous."""

    plans: int
    running: int
    rendezvous: RendezvousStatistics


#: The handlers of a task's messages, called after the checks that the sender is a member and speaks for itself.
REQUESTS: RequestTable[TaskServer] = RequestTable()
NOTICES: HandlerTable[TaskServer, Arrival, None] = HandlerTable()


class TaskServer:
    """The task `name`, which listens at `address` as soon as it is constructed.

    process          identity of this process; state that the coordinator placed on another one is not created here
    threads, clock   executor for its work and clock of its timeouts, instead of threads of the task
    flights          writes its events to a file when a wait lasted too long, or on request
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
        threads: Executor | None = None,
        clock: Clock | None = None,
        flights: FlightRecorder | None = None,
        on_stall: Callable[[str], None] = lambda why: None,
        described: Callable[[str], str] = short_task_name,
    ) -> None:
        self.name, self._process = name, process
        self._flights, self._on_stall = flights, on_stall
        self.recorder = flights.recorder if flights is not None else Recorder()
        self.store = store or Store()
        settings = settings or TaskSettings()
        self._lock = threading.Lock()
        self._live: dict[str, TaskInfo] = {}
        #: The plans registered here.
        self.plans = PlanRegistry(name)
        #: The queues and accumulators that it holds for peers.
        self.resources = TaskResources(name, self.store)
        self._creation = VariableCreation(self.store, self.plans.program, self._refuse_for_another_process, name)
        self.threads = threads or OnDemandThreads(f"dflow {name}")
        self.requests = RequestQueues(self.threads)
        #: Counts of the steps that this task has started.
        self.step_counts = StepCounts()
        self.observer = TaskObserver(self.recorder, self.state, self.usage)
        self._gate = MemberGate(name)
        self.refuse_departed = self._gate.refuse_departed
        #: Connections to the other tasks.
        self.peers = Peers(
            transport,
            name=name,
            handler=self,
            connect_timeout_s=settings.connect_timeout_s,
            reach_timeout_s=settings.reach_timeout_s,
            note=self.recorder.note,
            on_opened=self._gate.opened,
            submit=self.threads.submit,
        )
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
        #: The parts of steps that run here.
        self.runs = PlanRuns(name, self.store, self.channel, self.recorder, self.threads)
        self.starter = StepStarter(name, self.peers, self.plans, self.runs)
        #: Held closed while the state of all tasks is captured.
        self.gate = StepGate(name)
        #: The runs of synchronous training that it aggregates.
        self.rounds = StepAggregator(
            name,
            process,
            self.resources,
            self.starter.start_unattended,
            self.gate,
            self._soon,
            has_left=self.channel.has_left,
            ask=lambda task, message, on_reply: self.peer(task).start(message, on_reply=on_reply),
        )
        #: The runs of asynchronous training whose staleness it bounds.
        self.staleness = StalenessBounds(self.channel.has_left, lambda: self._gate.death_known_at)
        self._checkpoints = TaskCheckpoints(
            name, self.store, self.channel.has_left, self.peers, settings.reach_timeout_s
        )
        self._listener = transport.listen(address, name=name, handler=self, resume_s=settings.reach_timeout_s)

    @property
    def address(self) -> str:
        """Address that other tasks connect to."""
        return self._listener.address

    def peer(self, task: str) -> Peer:
        """Return the connection to another task, opened if needed; see `Peers.get`."""
        return self.peers.get(task)

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """Messages, values and bytes that this task has sent since its start, per edge."""
        return self.channel.traffic()

    def steps_ended(self) -> int:
        """Number of parts of steps that have ended here, with or without an error."""
        return self.runs.counts.totals().ended

    def doing(self) -> str:
        """Describe the oldest part of a step that runs here, and its longest wait, or what is compiled; else empty."""
        running = self.runs.running()
        if not running:
            return prepared()
        waits = self.channel.oldest_wait()
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        return f"{describe(running[0])}{more}" + (f": {waits}" if waits else "")

    def stalled(self, why: str) -> str:
        """Dump the newest events after a timeout; return the name of the file, as the end of an error."""
        path = self._flights.dump(why) if self._flights is not None else ""
        self._on_stall(why)
        return f"\n  the last events of {short_task_name(self.name)} are in {path}" if path else ""

    def state(self) -> TaskState:
        """Counters and present load of this task, for tools that watch it."""
        steps, held = self.step_counts.totals(), self.statistics()
        return TaskState(
            steps=steps.ended,
            step_s=steps.mean_s,
            parts=self.steps_ended(),
            running=held.running,
            waiting=held.rendezvous.waiters,
            held=held.rendezvous.values,
            depths=self.resources.depths(),
        )

    def usage(self) -> TaskUsage:
        """Processor time of this process, and values sent by this task, since their start."""
        used, sent = processor_use(), self.traffic()
        return TaskUsage(
            used.python_s,
            used.other_s,
            used.wakeups,
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
        """Apply a new roster. Waits on tasks that left fail now and are not retried."""
        live = {info.task: info for info in roster.tasks if info.left_at_s is None}
        gone = {info.task: info for info in roster.tasks if info.task not in live}
        with self._lock:
            before, self._live = self._live, live
        self.channel.set_senders(len(live) - 1)
        self._gate.roster_changed(roster)
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
            self.peers.introduce(self._gate.introduction(live[self.name]))
        for task, info in live.items():
            if task in before and before[task].life != info.life:
                self.task_left(task, "it was started again")
            self.channel.task_joined(task)
        # Held messages of new members, only now: before `task_joined` the channel may drop values in their steps.
        self._gate.admit()

    def task_left(self, task: str, why: str) -> None:
        """Handle the loss of a task: cancel the steps it started, and fail waits for its values with `TaskLost`."""
        error = TaskLost(f"{task} has left the cluster: {why}")
        for step in self.channel.task_left(task, error):
            self.runs.cancel(step, error)
        self.rounds.task_left(task)
        self.staleness.task_left(task)
        self._checkpoints.task_left(task)

    def close(self) -> None:
        """Cancel the running parts, stop listening and close every connection; a second call does nothing."""
        for step in self.runs.steps():
            self.runs.cancel(step, TaskLost(f"{self.name} has left the cluster in {describe(step)}: it closes"))
        closes = TaskLost(f"{self.name} has left the cluster: it closes")
        self.gate.open()
        self.rounds.close(closes)
        self.staleness.close(closes)
        self.plans.compiling.close(closes)
        self.requests.close()
        self._listener.close()
        self.peers.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.channel.close()

    # Messages; see `transport.base.Handler`.

    def on_call(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        """Handle a request; see `MemberGate` for those from a connection that is not yet a member's."""
        arrival = RequestArrival(peer, payload, responder)
        if peer in self._gate.members or message.is_open:
            self._handle(REQUESTS, message, arrival)
        else:
            self._gate.take(peer, Arrived(partial(self._handle_admitted, message, arrival), responder.fail))

    def _handle_admitted(self, message: Message, arrival: RequestArrival) -> None:
        try:
            self._handle(REQUESTS, message, arrival)
        except Exception as error:
            arrival.responder.fail(error)

    def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
        """Handle a notification; see `MemberGate` for those from a connection that is not yet a member's."""
        arrival = Arrival(peer, payload)
        if peer in self._gate.members:
            self._handle(NOTICES, message, arrival)
        else:
            handle, refused = partial(self._handle, NOTICES, message, arrival), partial(self._refused, peer, message)
            self._gate.take(peer, Arrived(handle, refused))

    def _refused(self, peer: Peer, message: Message, error: TaskLost) -> None:
        # A value of the step may come when the task is back, and nothing would end the step then.
        if isinstance(message, CancelStep) and message.origin == peer.name and self._gate.may_come_back(peer):
            self.channel.abort(StepId(message.origin, message.step), error)

    def _handle(self, table: HandlerTable[TaskServer, Any, None], message: Message, arrival: Arrival) -> None:
        handle = table.get(type(message))
        if handle is None:
            kind = type(message).__name__
            if table is NOTICES and REQUESTS.get(type(message)) is not None:
                raise NotImplementedError(f"{kind} is a request; use `call`")
            raise NotImplementedError(f"a task does not {'answer' if table is REQUESTS else 'take'} {kind}")
        if message.speaker and (whose := getattr(message, message.speaker)) != arrival.peer.name:
            kind = type(message).__name__
            raise SecurityError(f"{arrival.peer.name} may not speak for {whose}, as this {kind} does")
        handle(self, message, arrival)

    def on_close(self, peer: Peer, reason: str) -> None:
        """End the waits for values from a peer, since some may be lost with the connection."""
        self._gate.closed(peer)
        self.recorder.note(CONNECTION_LOST, None, peer.name, reason)
        error = TaskLost(f"the connection between {self.name} and {peer.name} has ended: {reason}")
        self.channel.connection_lost(peer.name, error)

    def _soon(self, work: Callable[..., object], *args: Any) -> None:
        """Run work on a thread; ignored once the task is closed."""
        with contextlib.suppress(RuntimeError):
            self.threads.submit(work, *args)

    # Requests handled on the reader thread.

    @REQUESTS.handles(Introduce)
    def _introduce(self, message: Introduce, arrival: RequestArrival) -> None:
        self._gate.introduced(arrival.peer, message)
        arrival.responder.reply(Ok())

    @REQUESTS.handles(RunPlan)
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

    @REQUESTS.handles(CancelStep)
    def _cancel_step(self, message: CancelStep, arrival: RequestArrival) -> None:
        self._cancel_as_told(message, arrival)
        arrival.responder.reply(Ok())

    @REQUESTS.handles(GetClock)
    def _get_clock(self, message: GetClock, arrival: RequestArrival) -> None:
        arrival.responder.reply(*self.observer.answer(message))

    # Requests handled on threads.

    @REQUESTS.queued(ReadVariables)
    def _read_variables(self, message: ReadVariables, arrival: RequestArrival) -> Handled:
        infos, data = encode_arrays(self.store.views(message.keys))
        return Arrays(infos), data

    @REQUESTS.queued(WriteVariable)
    def _write_variable(self, message: WriteVariable, arrival: RequestArrival) -> None:
        self.store.write(message.name, jax.device_put(decode_array(message.dtype, message.shape, arrival.payload)))

    @REQUESTS.queued(ForgetState)
    def _forget(self, message: ForgetState, arrival: RequestArrival) -> None:
        held = self.store.table if message.is_variable else self.resources
        held.forget(message.key, message.reason, message.remedy)

    @REQUESTS.queued(CreateResource)
    def _create_resource(self, message: CreateResource, arrival: RequestArrival) -> None:
        self._refuse_for_another_process(message.name, message.process)
        self.resources.create(message)

    @REQUESTS.queued(CallResource)
    def _call_resource(self, message: CallResource, arrival: RequestArrival) -> None:
        operands = decode_arrays(message.operands, arrival.payload)
        executable = self.resources.executable(message)
        step = StepId(message.origin, message.step)
        self.runs.run(executable, step, operands, partial(answer_arrays, arrival.responder))

    @REQUESTS.queued(RegisterPlan)
    def _register_plan(self, message: RegisterPlan, arrival: RequestArrival) -> Handled:
        wanted = self.plans.wanted(message)
        if wanted:
            return Wanted(wanted)
        return Registered(self.plans.add_encoded(message, arrival.payload, arrival.peer.name))

    # Requests of tools.

    @REQUESTS.on_own_thread(DumpEvents)
    def _dump_events(self, message: DumpEvents, arrival: RequestArrival) -> Handled:
        return Dumped(self._flights.dump(message.why) if self._flights is not None else "")

    # Notices.

    @NOTICES.handles(CancelStep)
    def _cancel_as_told(self, message: CancelStep, arrival: Arrival) -> None:
        step = StepId(message.origin, message.step)
        self.runs.cancel(step, StepCancelled(f"{describe(step)} was cancelled: {message.reason}"))

    @NOTICES.handles(ReleaseStep)
    def _release_step(self, message: ReleaseStep, arrival: Arrival) -> None:
        self.runs.release(StepId(message.origin, message.step), message.of)

    @NOTICES.handles(ForgetResults)
    def _forget_results(self, message: ForgetResults, arrival: Arrival) -> None:
        owner = owner_of(StepId(message.origin, message.first))
        self.store.applied.end_steps(message.run, owner, message.unfinished)

    def _refuse_for_another_process(self, name: str, process: str) -> None:
        """Raise TaskLost when the coordinator placed `name` on another process of this task."""
        if process not in ("", self._process):
            text = f"{name!r} is placed on an earlier process of {short_task_name(self.name)}"
            raise TaskLost(f"{text}, which has been started again since", REMEDY)


# The handlers that only call one part of the task.
REQUESTS.queued(CreateVariables)(
    lambda task, message, arrival: task._creation.create(message, arrival.payload, arrival.peer.name)
)
for _request in CHECKPOINT_REQUESTS:
    REQUESTS.queued(_request)(lambda task, message, _: task._checkpoints.handle(message))
REQUESTS.queued(GetFed)(lambda task, message, _: task.resources.fed(message))
REQUESTS.queued(ForgetFed)(lambda task, message, _: task.resources.forget_fed(message))
REQUESTS.queued(FailQueue)(lambda task, message, _: task.resources.fail_queue(message))
REQUESTS.queued(ProposeRounds)(lambda task, message, _: task.rounds.agree(message))
REQUESTS.queued(OpenRounds)(lambda task, message, arrival: task.rounds.open(message, arrival.payload))
REQUESTS.queued(NextRound)(lambda task, message, arrival: task.rounds.ask(message, arrival.responder))
REQUESTS.queued(LeaveRounds)(lambda task, message, arrival: task.rounds.leave(message, arrival.responder))
REQUESTS.handles(BeginStep)(lambda task, message, arrival: task.staleness.begin(message, arrival.responder))
for _observation in ON_THREADS:
    REQUESTS.on_own_thread(_observation)(lambda task, message, _: task.observer.answer(message))
for _kind in (Values, PulledValues):
    NOTICES.handles(_kind)(lambda task, message, arrival: task.channel.arrived(message, arrival.payload, arrival.peer))
NOTICES.handles(Offer)(lambda task, message, arrival: task.channel.offered(message, arrival.peer))
NOTICES.handles(Pull)(lambda task, message, arrival: task.channel.pulled(message, arrival.peer))
NOTICES.handles(Credit)(lambda task, message, arrival: task.channel.credited(message, arrival.peer))
NOTICES.handles(EndStep)(lambda task, message, _: task.staleness.end(message))
NOTICES.handles(ReleasePlan)(lambda task, message, _: task.plans.release(message.handle))
