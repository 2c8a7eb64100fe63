"""A worker's view of the cluster: variables on other tasks, and steps that run over them.

A step starts with one small message to each task that has a part in it; values then go straight from task to task,
and the worker waits for its own part and for each task's word that its part has ended. Every wait has a deadline and
its error names who is missing. What fails anywhere is cancelled everywhere.
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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import AbstractMesh, Mesh

from dflow.distributed.cluster_home import ClusterHome
from dflow.distributed.coordinator_client import CoordinatorClient
from dflow.distributed.flight_recorder import FlightRecorder
from dflow.distributed.messages import (
    AnyMessage,
    EdgeTraffic,
    Failure,
    NotFinite,
    Placed,
    PlaceVariable,
    RoundsDone,
    RunPlan,
)
from dflow.distributed.metrics import MetricsEndpoint, task_metrics
from dflow.distributed.plan_registration import PlanRegistration
from dflow.distributed.rendezvous import describe
from dflow.distributed.run_folder import run_folder
from dflow.distributed.step_numbers import first_of_a_life
from dflow.distributed.step_parts import StepParts, cancel_elsewhere
from dflow.distributed.strategies.applying import shared_step
from dflow.distributed.strategies.backup_workers import without_backups
from dflow.distributed.strategies.round_part import Part
from dflow.distributed.task_server import TaskServer, TaskSettings
from dflow.distributed.tracer import Here, Observed, Tracer
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import Peer, PendingReply, Reply, Transport
from dflow.distributed.unused_plans import UnusedPlans
from dflow.distributed.used_state import UsedState
from dflow.lowering.channel import StepId
from dflow.lowering.compile import Compiled, TaskPlan, make_plans
from dflow.lowering.devices import devices_in_order
from dflow.lowering.execute import Outcome
from dflow.lowering.local import fetched, lower_programs, refuse_spread
from dflow.lowering.passes.base import Observer, run_passes
from dflow.lowering.pipeline import pipeline
from dflow.lowering.recorder import STEP_BEGAN, STEP_ENDED, Recorder, described_end
from dflow.lowering.shared_exports import SharedExports
from dflow.lowering.state_backend import Runner
from dflow.lowering.store import Store
from dflow.tracing.context import home
from dflow.tracing.errors import (
    DeadlineExceeded,
    DflowError,
    TaskLost,
    TransportClosed,
    VariableError,
)
from dflow.tracing.source import at, caller
from dflow.tracing.task_name import short_task_name, split_task_name, task_name
from dflow.tracing.trace import Traced

#: How long the word of a step's end, or of why there is none, may take from task to task, in s.
WORD_S = 5.0

LOGGER = logging.getLogger("dflow")
#: From so much on two names of jobs may be one with a slip, such as worker and wroker.
_ALIKE = 0.83
_ENCODER = msgspec.msgpack.Encoder()


#: The clusters that this process is a task of now.
_joined: weakref.WeakSet[Cluster] = weakref.WeakSet()


def cluster_with(tasks: Collection[str]) -> Cluster | None:
    """The cluster joined by this process that has all of these tasks; None without one."""
    return next((cluster for cluster in _joined if {*tasks} <= {*cluster.tasks}), next(iter(_joined), None))


@dataclass(frozen=True)
class ClusterSettings:
    """How long things may take, in s.

    `join_timeout_s`     until the coordinator answers and the parameter tasks are up
    `request_timeout_s`  a read, a write, the creation of a variable, the compilation of a plan on a task
    `step_timeout_s`     one step, from its start until every task has ended its part
    """

    join_timeout_s: float = 60.0
    request_timeout_s: float = 300.0
    step_timeout_s: float = 600.0


class Cluster:
    """This process as the task `/job:<job>/task:<index>` of the cluster whose coordinator is at `coordinator`.

    store    where this task's own variables are
    address  where this task listens
    raises   DeadlineExceeded when the coordinator or a parameter task does not answer: it names the role, the address
            and how long was waited
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
    ) -> None:
        self.task = task_name(job, index)
        self.index = index
        self._settings = settings
        self._endpoints: list[MetricsEndpoint] = []
        first = first_of_a_life()
        self._steps = itertools.count(first + 1)
        name = self.task
        self._client = CoordinatorClient(transport, coordinator, name=name, timeout_s=settings.join_timeout_s)
        self._unused_plans = UnusedPlans()
        self._used = UsedState(name, lambda: self._client.roster)
        waits = TaskSettings(wait_timeout_s=settings.step_timeout_s)
        recorder = Recorder()
        #: What writes the newest events down when something is stuck.
        self.flights = FlightRecorder(name, recorder, run_folder(os.environ))
        self._client.call_on_dump(self.flights.dump_soon)
        self._server = TaskServer(
            name,
            transport,
            process=self._client.process,
            store=store,
            address=address,
            settings=waits,
            recorder=recorder,
            flights=self.flights,
            on_stall=self._client.ask_for_dumps,
            described=self._client.describe,
        )
        self._server.count_steps_from(first)
        try:
            self._join()
        except BaseException:
            self._server.close()
            self._client.close("could not join")
            raise
        _joined.add(self)

    def _join(self) -> None:
        self._client.call_on_roster(self._server.roster_changed)
        server = self._server
        roster = self._client.join(
            self.task, server.address, traffic=server.traffic, steps=server.steps_ended, doing=server.doing
        )
        job, _ = split_task_name(self.task)
        tasks = {*roster.expected, *(info.task for info in roster.tasks)} - {self.task}
        jobs = {split_task_name(task)[0] for task in tasks}
        for meant in () if job.rstrip("0123456789") in jobs else get_close_matches(job, jobs, 1, _ALIKE):
            LOGGER.warning("%s has joined as the first of job %r, was %r meant?", self.task, job, meant)
        others = [task for task in roster.expected if split_task_name(task)[0] != job]
        self._client.wait_for_tasks(others, timeout_s=self._settings.join_timeout_s)

    @property
    def recorder(self) -> Recorder:
        """The newest events of this task."""
        return self._server.recorder

    @property
    def step_timeout_s(self) -> float:
        """How long one step may take."""
        return self._settings.step_timeout_s

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that are alive, this one included."""
        return tuple(info.task for info in self._client.roster.tasks if info.left_at_s is None)

    @property
    def server(self) -> TaskServer:
        """What runs this task's parts of steps."""
        return self._server

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """What this task has sent to others so far, per edge."""
        return self._server.traffic()

    @contextmanager
    def parameter_servers(self, job: str = "ps") -> Iterator[None]:
        """Spread the variables made inside over the tasks of `job`, by size.

        The coordinator decides where, the same for every worker; the first worker to ask creates the variable. All are
        created together when the block ends, or before, when one of them is used. An error names the line on which its
        variable was made.
        """
        variables = ClusterHome(self, job)
        with home(variables), variables.together():
            yield

    def claim(
        self,
        run: str,
        total_steps: int,
        *,
        done: int = 0,
        step_s: float = 0.0,
        metrics: Mapping[str, float] = {},
        more: bool = True,
        not_finite: NotFinite | None = None,
    ) -> range:
        """Report the last claimed steps and get the next; see `CoordinatorClient.claim`."""
        return self._client.claim(
            run, total_steps, done=done, step_s=step_s, metrics=metrics, more=more, not_finite=not_finite
        )

    def shared_step(self) -> AbstractContextManager[None]:
        """Run a step inside, which other workers do too; see `applying.shared_step`."""
        return shared_step()

    def take_part(self, run: str, job: str) -> Part:
        """This worker's part in a run of synchronous training, whose gradients go to a task of `job`."""
        return Part(self, run, job)

    def wanted_gradients(self, backup_workers: int) -> int:
        """How many gradients end a round of synchronous training. Raises StrategyError when it is none."""
        return without_backups(self.colleagues()[1], backup_workers)

    def colleagues(self) -> tuple[tuple[str, ...], int]:
        """The tasks of this one's job that are alive or yet to come, and how many there are with those that left."""
        roster, (job, _) = self._client.roster, split_task_name(self.task)
        here = {info.task: info for info in roster.tasks if split_task_name(info.task)[0] == job}
        coming = {task for task in roster.expected if split_task_name(task)[0] == job}
        live = {task for task, info in here.items() if info.left_at_s is None}
        return tuple(sorted(live | coming)), len({*here} | coming)

    def elect(self, what: str) -> bool:
        """Whether this task is the one that does `what`: the first to ask is."""
        return self._client.elect(what)

    def barrier(self, name: str, *, timeout_s: float = 600.0, fails_on_leave: bool = False) -> tuple[str, ...]:
        """Wait until all tasks of this one's job have come to the barrier `name`; who has.

        They are those that are live or expected when the first comes. One that leaves is waited for no longer, or fails
        the barrier when any says `fails_on_leave`; one that joins meanwhile waits for the next time.
        raises  DeadlineExceeded naming those that are missing; TaskLost when the barrier has failed
        """
        return self._client.barrier(name, timeout_s=timeout_s, fails_on_leave=fails_on_leave).members

    def tell_rounds(self, report: RoundsDone) -> None:
        """Say how a run of synchronous training goes, for the status of the cluster."""
        self._client.tell_rounds(report)

    def report(self, name: str, value: float) -> None:
        """Add a result to the closing table of the run."""
        self._client.report(name, float(value))

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write what all tasks do in the steps begun and ended inside to `path`, for Perfetto and chrome://tracing.

        Every worker's steps are in it. Tasks that cannot be reached are left out, with a warning.
        raises  OSError when the file cannot be written
        """
        reached: dict[str, Observed] = {self.task: Here(self._server.observer)}
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
        """Serve this task's metrics for Prometheus until `close`; the address. See `MetricsEndpoint`."""
        endpoint = MetricsEndpoint(task_metrics(self._server), place)
        self._endpoints.append(endpoint)
        return endpoint.address

    def close(self) -> None:
        """Leave the cluster; a second call does nothing."""
        while self._endpoints:
            self._endpoints.pop().close()
        _joined.discard(self)
        self._client.leave()
        self._server.close()

    # Variables on other tasks.

    def request(self, task: str, message: Any, payload: Any = b"") -> Reply:
        """Ask another task, and wait for its answer.

        raises  TaskLost when the task is gone, or has lost what this one uses on it; DeadlineExceeded, which says how
                the task is
        """
        try:
            return self._call(task, message, payload, 0.0)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}; {self._client.describe(task)}") from error

    def request_for(self, task: str, message: AnyMessage, wait_s: float) -> Reply:
        """Like `request`, when the task may wait `wait_s` before it answers."""
        return self._call(task, message, b"", wait_s)

    def _call(self, task: str, message: AnyMessage, payload: Any, wait_s: float) -> Reply:
        with self._used.explained([task]):
            return self._server.peer(task).call(message, payload, timeout_s=wait_s + self._settings.request_timeout_s)

    def request_all(self, requests: Sequence[tuple[str, AnyMessage, Any]]) -> list[Reply | DflowError]:
        """Ask tasks, all at a time; of each the answer, or why there is none."""
        started = [self._started(*request) for request in requests]
        return [self._answer(task, wait) for (task, _, _), wait in zip(requests, started, strict=True)]

    def _started(self, task: str, message: AnyMessage, payload: Any) -> PendingReply | DflowError:
        try:
            with self._used.explained([task]):
                return self._server.peer(task).start(message, payload)
        except DflowError as error:
            return error

    def _answer(self, task: str, started: PendingReply | DflowError) -> Reply | DflowError:
        if isinstance(started, DflowError):
            return started
        try:
            with self._used.explained([task]):
                return started.wait(self._settings.request_timeout_s)
        except DeadlineExceeded as error:
            return DeadlineExceeded(f"{error}; {self._client.describe(task)}")
        except DflowError as error:
            return error

    def place_all(self, requests: Sequence[PlaceVariable]) -> list[Placed | Failure]:
        """The task that holds, or shall hold, each of the variables; or why there is none."""
        answers = self._client.place_all(requests)
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Placed):
                self._used.note(request.name, answer)
        return answers

    def place_resource(self, name: str, kind: str, said: str, size_bytes: int, *, job: str, on: str) -> Placed:
        """The task that holds, or shall hold, a queue or an accumulator; see `CoordinatorClient.place`."""
        placed = self._client.place(name, said, (), size_bytes, job=job, kind=kind, on=on)
        if kind != "run":  # of which there may be many; its accumulator is on the same task
            self._used.note(name, placed)
        return placed

    def unplace(self, name: str) -> None:
        """Free a name whose state is gone."""
        self._client.unplace(name)
        self._used.forget(name)

    def request_step(self, task: str, message: Callable[[StepId], AnyMessage], payload: Any, timeout_s: float) -> Reply:
        """Ask another task for what is a step there, and wait for it; given up there too when it is given up here.

        raises  the error it ended with; TaskLost when the task is gone
        """
        step = StepId(self.task, next(self._steps))
        with self._used.explained([task]):
            peer = self._server.peer(task)
            try:
                # What waits there ends there first, by its own deadline.
                left_s = min(timeout_s + self._settings.request_timeout_s, threading.TIMEOUT_MAX)
                return peer.start(message(step), payload).wait(left_s)
            except BaseException as error:
                self._cancel(step, [peer], error)
                raise

    # Steps.

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        """Place, cut and register a traced function; the result runs one step of it."""
        _refuse_two_handles(traced.variables)
        if traced.compiler_options:
            raise DflowError(
                f"{traced.name} has variables on other tasks, which compile for themselves, so it takes no "
                f"compiler_options{at(caller())}\n  set XLA_FLAGS where the tasks are started"
            )
        passes = pipeline(self.task, self.tasks, devices_in_order())
        graph = run_passes(traced.graph, passes, check=check, observe=observe)
        refuse_spread(graph, traced, self._server.store)
        keys = {ref: variable.key for ref, variable in zip(graph.refs, traced.variables, strict=True)}
        compiled = make_plans(graph, self.task, keys)
        given_up = [len(traced.constants) + leaf for leaf in traced.donated]
        handles = self._register(compiled, given_up, traced.meshes)
        step = _Step(self, handles, traced.constants, compiled)
        self._unused_plans.release_after(step, handles)
        return step

    def _register(
        self, compiled: Compiled, given_up: Sequence[int], meshes: Mapping[AbstractMesh, Mesh]
    ) -> Mapping[str, int]:
        self._unused_plans.release(self._server, self.tasks)
        lowered = lower_programs(compiled.local, self._server.store, given_up, meshes=meshes)
        # XLA compiles without the interpreter's lock, while other tasks' programs are exported and compiled.
        compiling = ThreadPoolExecutor(1, "dflow-compile")
        try:
            programs = compiling.submit(lambda: [program.compile() for program in lowered])
            handles = self._handles(self._registrations(compiled.remote))
            return {**handles, self.task: self._server.register(compiled.local.plan, programs.result())}
        finally:
            compiling.shutdown(wait=False)

    def _registrations(self, parts: Mapping[str, TaskPlan]) -> dict[str, PlanRegistration]:
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
                raise DeadlineExceeded(f"{error}; {self._client.describe(task)}") from error
        return found

    def register_hosted(self, traced: Traced, host: str) -> tuple[Mapping[str, int], Sequence[Any], Sequence[Any]]:
        """Register a traced function that the task `host` is to run as a step of its own.

        The handles of its parts, by task, and what `host` feeds its own beside the arguments: before and after them.
        """
        graph = run_passes(traced.graph, pipeline(host, self.tasks), check=False, observe=None)
        keys = {ref: variable.key for ref, variable in zip(graph.refs, traced.variables, strict=True)}
        compiled = make_plans(graph, host, keys)
        parts = {**compiled.remote, host: compiled.local}
        handles = self._handles(self._registrations(parts))
        return handles, traced.constants, [literal.array for literal in compiled.literals]

    def run_step(self, handles: Mapping[str, int], feeds: Sequence[Any]) -> tuple[jax.Array, ...]:
        """Run one step on every task that has a part in it; this task's fetches.

        raises  what failed first on any of them, whose text names the task; TaskLost when a task is gone
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
            # Longer by a little, for the wait for a value, which ends at its time too, says more than this one.
            if not end.wait(timeout_s + min(WORD_S, timeout_s)):
                whose = "; ".join(map(self._client.describe, parts.running))
                text = f"{describe(step)} did not end within {timeout_s:g} s; still at it: {whose}"
                raise DeadlineExceeded(text + self._server.stalled(text))
            fetches = end.fetches()
        except TransportClosed as error:
            gone = [short_task_name(task) for task, peer in others.items() if peer.closed]
            lost = TaskLost(
                f"{' and '.join(gone) or 'a task'} was lost in {describe(step)}: {error}{at(caller())}\n"
                "  see its output; if its process has ended, its variables are lost: start the whole cluster again"
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
    """The end of a step's parts, waited for by one thread, which wakes once."""

    def __init__(self) -> None:
        self._outcome: Outcome = ()
        self._is_over = threading.Lock()
        self._is_over.acquire()

    def over(self, outcome: Outcome) -> None:
        """The step has ended."""
        self._outcome = outcome
        self._is_over.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        return self._is_over.acquire(timeout=timeout_s)

    def fetches(self) -> tuple[jax.Array, ...]:
        """What the own part gave; raises what ended the step."""
        return fetched(self._outcome)


class _Step:
    """One traced function, registered on every task it touches."""

    def __init__(
        self, cluster: Cluster, handles: Mapping[str, int], constants: Sequence[Any], compiled: Compiled
    ) -> None:
        self._cluster = cluster
        self._handles = handles
        self._constants = list(constants)
        self._literals = [literal.array for literal in compiled.literals]

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        arrays = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
        return self._cluster.run_step(self._handles, [*self._constants, *arrays, *self._literals])


def _refuse_two_handles(variables: Sequence[Any]) -> None:
    """Two handles of one variable would each be given its buffer, and its updates no order."""
    held: dict[tuple[str | None, str], Any] = {}
    for variable in variables:
        other = held.setdefault((variable.device, variable.key), variable)
        if other is not variable:
            raise VariableError(
                f"a function uses variable {variable.name!r} by two handles, made{at(other.loc)}\n  and"
                f"{at(variable.loc)}\n  use one of the two, or give the other another name or `prefix=`"
            )
