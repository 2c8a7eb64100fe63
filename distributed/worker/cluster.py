"""A worker's view of the cluster: variables on other tasks, and steps that run on several tasks.

A step starts with one small message to each task that has a part in it. Values then travel directly from task to
task; the worker waits for its own part and for each task's answer that its part has ended. Every wait has a deadline,
and its error names the missing task. An error anywhere cancels the step everywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.metrics import MetricsEndpoint
from dflow.distributed.observe.tracer import Observed, Tracer
from dflow.distributed.process.run_folder import run_folder
from dflow.distributed.steps.plan_registration import PlanRegistration
from dflow.distributed.steps.rendezvous import describe
from dflow.distributed.steps.step_numbers import first_of_a_life
from dflow.distributed.steps.step_parts import StepParts, cancel_elsewhere
from dflow.distributed.steps.unused_plans import UnusedPlans
from dflow.distributed.strategies.applying import shared_step
from dflow.distributed.strategies.round_part import RoundPart
from dflow.distributed.task.task_metrics import task_metrics
from dflow.distributed.task.task_server import TaskServer, TaskSettings
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import OnReply, Peer, PendingReply, Reply, Transport
from dflow.distributed.wire.codec import Payload
from dflow.distributed.wire.messages.connection import Failure
from dflow.distributed.wire.messages.message import Answer, Request
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable, PlaceVariables, Unplace
from dflow.distributed.wire.messages.plans import RunPlan
from dflow.distributed.wire.messages.roster import EdgeTraffic
from dflow.distributed.wire.messages.status import GetStatus
from dflow.distributed.worker.cluster_home import ClusterHome
from dflow.distributed.worker.cluster_step import PartitionedStep, no_options
from dflow.distributed.worker.coordination import Coordinated
from dflow.distributed.worker.used_state import UsedState
from dflow.lowering.passes.base import Observer, run_passes
from dflow.lowering.pipeline import ALONE, pipeline
from dflow.lowering.programs.program import LoweredProgram
from dflow.lowering.programs.shared_exports import SharedExports
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.pending_operations import Cancel
from dflow.lowering.queues.timers import Clock
from dflow.lowering.state.store import Store
from dflow.lowering.state_backend import Runner
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.steps.local_step import fetched
from dflow.lowering.steps.lowered import Lowered, literals, make_plans
from dflow.lowering.steps.recorder import STEP_BEGAN, STEP_ENDED, Recorder, described_end
from dflow.lowering.steps.spread_variables import refuse_spread
from dflow.lowering.values.devices import devices_in_order
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.task_name import short_task_name, split_task_name, task_name
from dflow.tracing.errors import (
    DeadlineExceeded,
    DflowError,
    TaskLost,
    TransportClosed,
    VariableError,
)
from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.source import at
from dflow.tracing.state.context import home

#: The job of a process that is in no cluster.
LOCAL_JOB = split_task_name(ALONE)[0]

#: Time for the report of a step's end or error to travel from task to task, in s.
WORD_S = 5.0

LOGGER = logging.getLogger("dflow")
#: The most variables that one message places.
MOST_PLACED = 256
#: Least similarity of two job names to suspect a typo, such as wroker for worker.
_ALIKE = 0.83
_ENCODER = msgspec.msgpack.Encoder()


#: The clusters that this process is a task of now.
_joined: weakref.WeakSet[Cluster] = weakref.WeakSet()


def cluster_with(tasks: Collection[str]) -> Cluster | None:
    """Return the joined cluster that has all of these tasks, else any joined cluster; None if there is none."""
    return next((cluster for cluster in _joined if {*tasks} <= {*cluster.tasks}), next(iter(_joined), None))


@dataclass(frozen=True)
class ClusterSettings:
    """Timeouts of a cluster, in s.

    `join_timeout_s`     until the coordinator answers, and then until the parameter tasks have joined
    `request_timeout_s`  a read, a write, the creation of a variable, the compilation of a plan on a task
    `step_timeout_s`     one step, from its start until every task has ended its part
    """

    join_timeout_s: float = 60.0
    request_timeout_s: float = 300.0
    step_timeout_s: float = 600.0


class Cluster(Coordinated):
    """This process as the task `/job:<job>/task:<index>` of the cluster whose coordinator is at `coordinator`.

    store          holds the variables of this task
    address        address that this task listens at
    is_standalone  whether this is the only task for good, so that variables live in this process
    clock          makes the calls of the session with the coordinator; None means a thread
    raises   DeadlineExceeded when the coordinator or a parameter task does not answer: it names the role, the address
             and the time waited
    """

    def __init__(
        self,
        coordinator: str,
        transport: Transport,
        *,
        job: str,
        index: int,
        store: Store,
        address: str = LOCAL_ADDRESS,
        settings: ClusterSettings = ClusterSettings(),
        is_standalone: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.task = task_name(job, index)
        self.index = index
        self._is_standalone = is_standalone
        self._settings = settings
        self._endpoints: list[MetricsEndpoint] = []
        first = first_of_a_life()
        self._steps = itertools.count(first + 1)
        name = self.task
        self.coordinator = CoordinatorClient(
            transport, coordinator, name=name, timeout_s=settings.join_timeout_s, clock=clock
        )
        self._unused_plans = UnusedPlans()
        self._used = UsedState(name, lambda: self.coordinator.session.roster)
        waits = TaskSettings(wait_timeout_s=settings.step_timeout_s)
        recorder = Recorder()
        #: Writes the newest events to a file when something is stuck.
        self.flights = FlightRecorder(name, recorder, run_folder(os.environ))
        self.coordinator.session.call_on_dump(self.flights.dump_soon)
        self._server = TaskServer(
            name,
            transport,
            process=self.coordinator.session.process,
            store=store,
            address=address,
            settings=waits,
            recorder=recorder,
            flights=self.flights,
            on_stall=self.coordinator.ask_for_dumps,
            described=self.coordinator.describe,
        )
        self._server.channel.count_from(first)
        try:
            self._join()
        except BaseException:
            self._server.close()
            self.coordinator.close("could not join")
            raise
        if not is_standalone:
            _joined.add(self)

    def _join(self) -> None:
        self.coordinator.session.call_on_roster(self._server.roster_changed)
        server = self._server
        roster = self.coordinator.join(
            self.task, server.address, traffic=server.traffic, steps=server.steps_ended, doing=server.doing
        )
        job, _ = split_task_name(self.task)
        tasks = {*roster.expected, *(info.task for info in roster.tasks)} - {self.task}
        jobs = {split_task_name(task)[0] for task in tasks}
        # A numbered job, such as worker2 beside worker, is no typo.
        for meant in () if job.rstrip("0123456789") in jobs else get_close_matches(job, jobs, 1, _ALIKE):
            LOGGER.warning("%s has joined as the first of job %r, was %r meant?", self.task, job, meant)
        others = [task for task in roster.expected if split_task_name(task)[0] != job]
        self.coordinator.wait_for_tasks(others, timeout_s=self._settings.join_timeout_s)

    @property
    def recorder(self) -> Recorder:
        """The newest events of this task."""
        return self._server.recorder

    @property
    def step_timeout_s(self) -> float:
        """Longest duration of one step, in s."""
        return self._settings.step_timeout_s

    @property
    def tasks(self) -> tuple[str, ...]:
        """The live tasks, including this one."""
        return tuple(info.task for info in self.coordinator.session.roster.tasks if info.left_at_s is None)

    @property
    def server(self) -> TaskServer:
        """The server that runs this task's parts of steps."""
        return self._server

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """Values and bytes that this task has sent since its start, per edge."""
        return self._server.traffic()

    @contextmanager
    def parameter_servers(self, job: str = "ps") -> Iterator[None]:
        """Spread the variables made inside over the tasks of `job`, by size.

        The coordinator chooses the task of each, the same for every worker; the first worker to ask creates it. All
        are created together when the block ends, or earlier when one of them is used. An error names the line on
        which its variable was made.
        """
        if self._is_standalone:
            yield
            return
        variables = ClusterHome(self, job)
        with home(variables), variables.together():
            yield

    def shared_step(self) -> AbstractContextManager[None]:
        """Run a step inside that other workers, if there can be any, run too; see `applying.shared_step`."""
        return nullcontext() if self._is_standalone else shared_step()

    def take_part(self, run: str, job: str) -> RoundPart | None:
        """Return this worker's part in a run of synchronous training, whose gradients go to a task of `job`.

        None in a standalone process, where each step is a round of one worker.
        """
        return None if self._is_standalone else RoundPart(self, run, job)

    def colleagues(self) -> tuple[tuple[str, ...], int]:
        """Return the live and expected tasks of this task's job, and their number including tasks that left."""
        roster, (job, _) = self.coordinator.session.roster, split_task_name(self.task)
        here = {info.task: info for info in roster.tasks if split_task_name(info.task)[0] == job}
        coming = {task for task in roster.expected if split_task_name(task)[0] == job}
        live = {task for task, info in here.items() if info.left_at_s is None}
        return tuple(sorted(live | coming)), len({*here} | coming)

    @property
    def results(self) -> Mapping[str, float]:
        """The results that tasks have reported, by name."""
        return self.coordinator.ask(GetStatus()).results

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write the events of all tasks, for steps begun and ended inside, to `path`, for Perfetto or chrome://tracing.

        It has every worker's steps. Tasks that cannot be reached are left out, with a warning.
        raises  OSError when the file cannot be written
        """
        reached: dict[str, Observed] = {self.task: self._server.observer}
        for task in self.tasks:
            if task != self.task:
                with contextlib.suppress(DflowError):
                    reached[task] = self._server.peer(task)
        tracer = Tracer(reached)
        try:
            yield
        finally:
            found = tracer.stop()
            for task in sorted({*self.tasks} - {*found.events}):
                LOGGER.warning("the trace is without %s, which did not answer", short_task_name(task))
            found.write(path)

    def serve_metrics(self, place: str | int) -> str:
        """Serve this task's metrics for Prometheus until `close`; return the address. See `MetricsEndpoint`."""
        endpoint = MetricsEndpoint(lambda: task_metrics(self._server), place)
        self._endpoints.append(endpoint)
        return endpoint.address

    def close(self) -> None:
        """Leave the cluster; a second call does nothing."""
        while self._endpoints:
            self._endpoints.pop().close()
        _joined.discard(self)
        self.coordinator.leave()
        self._server.close()

    # Variables on other tasks.

    def request(self, task: str, message: Request[Answer], payload: Payload = b"") -> Reply[Answer]:
        """Send another task a request, and wait for its answer.

        raises  TaskLost when the task left, or lost state that this one uses on it; DeadlineExceeded, with a
                description of the task
        """
        try:
            return self._call(task, message, payload, 0.0)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}; {self.coordinator.describe(task)}") from error

    def request_for(self, task: str, message: Request[Answer], wait_s: float) -> Reply[Answer]:
        """Like `request`, when the task may wait `wait_s` before it answers."""
        return self._call(task, message, b"", wait_s)

    def _call(self, task: str, message: Request[Answer], payload: Payload, wait_s: float) -> Reply[Answer]:
        with self._used.explained([task]):
            return self._server.peer(task).call(message, payload, timeout_s=wait_s + self._settings.request_timeout_s)

    def request_all(self, requests: Sequence[tuple[str, Request[Answer], Payload]]) -> list[Reply[Answer] | DflowError]:
        """Send requests to tasks concurrently; return the answer or the error of each, in order."""
        started = [self._started(*request) for request in requests]
        return [self._answer(task, wait) for (task, _, _), wait in zip(requests, started, strict=True)]

    def _started(self, task: str, message: Request[Answer], payload: Payload) -> PendingReply[Answer] | DflowError:
        try:
            with self._used.explained([task]):
                return self._server.peer(task).start(message, payload)
        except DflowError as error:
            return error

    def _answer(self, task: str, started: PendingReply[Answer] | DflowError) -> Reply[Answer] | DflowError:
        if isinstance(started, DflowError):
            return started
        try:
            with self._used.explained([task]):
                return started.wait(self._settings.request_timeout_s)
        except DeadlineExceeded as error:
            return DeadlineExceeded(f"{error}; {self.coordinator.describe(task)}")
        except DflowError as error:
            return error

    def place_all(self, requests: Sequence[PlaceVariable]) -> list[Placed | Failure]:
        """Return the task of each variable, where it is or must be created, or the failure, in order."""
        answers: list[Placed | Failure] = []
        for first in range(0, len(requests), MOST_PLACED):
            part = tuple(requests[first : first + MOST_PLACED])
            answers += self.coordinator.ask(PlaceVariables(part)).answers
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Placed):
                self._used.note(request.name, answer)
        return answers

    def place(self, request: PlaceVariable) -> Placed:
        """Return the task where a queue or an accumulator is or must be created.

        raises  VariableError when the name has another type; DeviceError without such a job, or when it is on another
                task than `request.on`; TaskLost when the process that held it has left
        """
        placed = self.coordinator.ask(request)
        self._used.note(request.name, placed)
        return placed

    def unplace(self, name: str) -> None:
        """Free a name whose state no longer exists."""
        self.coordinator.ask(Unplace(name))
        self._used.forget(name)

    def request_step(
        self, task: str, message: Callable[[StepId], Request[Answer]], payload: Payload, timeout_s: float
    ) -> Reply[Answer]:
        """Send another task a request that runs as a step there, and wait; cancel that step when this wait fails.

        raises  the error that the step ended with; TaskLost when the task left
        """
        with self._used.explained([task]):
            started, cancel = self._begun(task, message, payload)
            try:
                # The step's own deadline on that task ends it first.
                return started.wait(min(timeout_s + self._settings.request_timeout_s, threading.TIMEOUT_MAX))
            except BaseException as error:
                cancel(error)
                raise

    def start_step(
        self, task: str, message: Callable[[StepId], Request[Answer]], payload: Payload, on_reply: OnReply[Answer]
    ) -> Cancel:
        """Like `request_step`, but call `on_reply` in place of waiting; the returned function cancels the step.

        If this raises, `on_reply` may have been called too.
        """

        def explained(reply: Outcome[Reply[Answer]]) -> None:
            try:
                with self._used.explained([task]):
                    if isinstance(reply, BaseException):
                        raise reply
            except BaseException as error:
                reply = error
            on_reply(reply)

        with self._used.explained([task]):
            return self._begun(task, message, payload, explained)[1]

    def _begun(
        self,
        task: str,
        message: Callable[[StepId], Request[Answer]],
        payload: Payload,
        on_reply: OnReply[Answer] | None = None,
    ) -> tuple[PendingReply[Answer], Cancel]:
        """Send a request that runs as a step; return it with the function that cancels the step."""
        step = StepId(self.task, next(self._steps))
        peer = self._server.peer(task)
        cancel = partial(self._cancel, step, [peer])
        try:
            return peer.start(message(step), payload, on_reply), cancel
        except BaseException as error:
            cancel(error)
            raise

    # Steps.

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        """Place, partition and register a traced function; calling the result runs one step of it."""
        step = self.lower(traced, check=check, observe=observe)
        return self._register(step, step.own())

    def lower(self, traced: Traced, *, check: bool, observe: Observer | None) -> PartitionedStep:
        """Place and partition a traced function."""
        _refuse_two_handles(traced.variables)
        if traced.compiler_options:
            raise no_options(traced.name)
        passes = pipeline(self.task, self.tasks, devices_in_order())
        graph = run_passes(traced.graph, passes, check=check, observe=observe)
        refuse_spread(graph, traced, self._server.store)
        keys = {ref: variable.key for ref, variable in zip(graph.refs, traced.variables, strict=True)}
        return PartitionedStep(
            traced, make_plans(graph, self.task, keys), literals(graph), self._server.store, self._register
        )

    def _register(self, step: PartitionedStep, own: Sequence[LoweredProgram]) -> Runner:
        handles = self._registered(step.plans, own)
        registered = ClusterStep(self, handles, step.traced.constants, step.literals)
        self._unused_plans.release_after(registered, handles)
        return registered

    def _registered(self, plans: Mapping[str, Lowered], uncompiled: Sequence[LoweredProgram]) -> Mapping[str, int]:
        self._unused_plans.release(self._server, self.tasks)
        own = plans[self.task]
        others = {task: part for task, part in plans.items() if part is not own}
        # XLA compiles without the GIL, while other tasks' programs are exported and compiled.
        compiling = ThreadPoolExecutor(1, "dflow-compile")
        try:
            programs = compiling.submit(lambda: [program.compile() for program in uncompiled])
            handles = self._handles(self._registrations(others))
            return {**handles, self.task: self._server.register(own.plan, programs.result())}
        finally:
            compiling.shutdown(wait=False)

    def _registrations(self, parts: Mapping[str, Lowered]) -> dict[str, PlanRegistration]:
        exports = SharedExports()
        with self._used.explained([*parts]):
            return {task: PlanRegistration(self._server.peer(task), part, exports) for task, part in parts.items()}

    def _handles(self, asked: Mapping[str, PlanRegistration]) -> dict[str, int]:
        found = {}
        for task, registration in asked.items():
            try:
                with self._used.explained([task]):
                    found[task] = registration.handle(self._settings.request_timeout_s)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{error}; {self.coordinator.describe(task)}") from error
        return found

    def register_hosted(self, traced: Traced, host: str) -> tuple[Mapping[str, int], Sequence[Any], Sequence[Any]]:
        """Register a traced function that the task `host` will run as a step of `host`.

        Returns the plan handles by task, and the arrays to feed `host`'s part before and after the arguments.
        """
        graph = run_passes(traced.graph, pipeline(host, self.tasks), check=False, observe=None)
        keys = {ref: variable.key for ref, variable in zip(graph.refs, traced.variables, strict=True)}
        handles = self._handles(self._registrations(make_plans(graph, host, keys)))
        return handles, traced.constants, literals(graph)

    def run_step(self, handles: Mapping[str, int], feeds: Sequence[Any]) -> tuple[jax.Array, ...]:
        """Run one step on every task that has a part in it; return this task's fetches.

        raises  the first error of any task, whose text names it; TaskLost when a task left
        """
        step = StepId(self.task, next(self._steps))
        began_ns = self._server.recorder.note(STEP_BEGAN, step)
        try:
            with self._used.explained(handles):
                fetches = self._run_step(step, handles, feeds)
        except BaseException as error:
            self._step_ended(step, began_ns, error)
            raise
        self._step_ended(step, began_ns, None)
        return fetches

    def _step_ended(self, step: StepId, began_ns: int, error: BaseException | None) -> None:
        ended_ns = self._server.recorder.note(STEP_ENDED, step, "", described_end(error))
        self._server.steps.ended((ended_ns - began_ns) / 1e9, error)

    def _run_step(self, step: StepId, handles: Mapping[str, int], feeds: Sequence[Any]) -> tuple[jax.Array, ...]:
        others = {task: self._server.peer(task) for task in handles if task != self.task}
        end = _Waited()
        parts = StepParts((self.task, *others), end.over)
        try:
            for task, peer in others.items():
                peer.start(RunPlan(handles[task], step.origin, step.number), on_reply=partial(parts.ended, task))
            self._server.run(handles[self.task], step, feeds, partial(parts.ended, self.task))
            timeout_s = self._settings.step_timeout_s
            # Slightly longer than the receives' own timeout, whose error says more than this one.
            if not end.wait(timeout_s + min(WORD_S, timeout_s)):
                whose = "; ".join(map(self.coordinator.describe, parts.running))
                text = f"{describe(step)} did not end within {timeout_s:g} s; still at it: {whose}"
                raise DeadlineExceeded(text + self._server.stalled(text))
            fetches = end.fetches()
        except TransportClosed as error:
            gone = [short_task_name(task) for task, peer in others.items() if peer.closed]
            lost = TaskLost(
                f"{' and '.join(gone) or 'a task'} was lost in {describe(step)}: {error}",
                "see its output; if its process has ended, its variables are lost: start the whole cluster again",
            )
            self._cancel(step, others.values(), lost)
            raise lost from None
        except BaseException as error:
            self._cancel(step, others.values(), error)
            raise
        return fetches

    def _cancel(self, step: StepId, others: Iterable[Peer], error: BaseException) -> None:
        self._server.cancel(step, error)
        cancel_elsewhere(step, others, error)


class _Waited:
    """The end of a step's parts, for one waiting thread, which wakes once."""

    def __init__(self) -> None:
        self._outcome: Outcome[Fetches] = ()
        self._is_over = threading.Lock()
        self._is_over.acquire()

    def over(self, outcome: Outcome[Fetches]) -> None:
        """Record the step's outcome and wake the waiting thread."""
        self._outcome = outcome
        self._is_over.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; return whether the step has ended."""
        return self._is_over.acquire(timeout=timeout_s)

    def fetches(self) -> tuple[jax.Array, ...]:
        """Return the fetches of this task's part; raises the error that ended the step."""
        return fetched(self._outcome)


class ClusterStep:
    """One traced function, registered on every task that has a part in it."""

    def __init__(
        self, cluster: Cluster, handles: Mapping[str, int], constants: Sequence[Any], literals: Sequence[Any]
    ) -> None:
        self._cluster = cluster
        self._handles = handles
        self._constants = list(constants)
        self._literals = literals

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        arrays = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
        return self._cluster.run_step(self._handles, [*self._constants, *arrays, *self._literals])


def _refuse_two_handles(variables: Sequence[Any]) -> None:
    """Raise VariableError for two handles of one variable: each would get its buffer, and its updates no order."""
    held: dict[tuple[str | None, str], Any] = {}
    for variable in variables:
        other = held.setdefault((variable.device, variable.key), variable)
        if other is not variable:
            raise VariableError(
                f"a function uses variable {variable.name!r} by two handles, made{at(other.loc)}\n  and"
                f"{at(variable.loc)}\n  use one of the two, or give the other another name or `prefix=`"
            )
