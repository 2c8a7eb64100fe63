"""A worker's view of the cluster: its tasks, and what a script does with them.

Every wait has a deadline, and its error names the missing task.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from dflow.distributed.asynchronous.staleness_bound import StalenessBound
from dflow.distributed.client.coordinator_client import ANSWER_S, CoordinatorClient
from dflow.distributed.cluster.cluster_home import ClusterHome
from dflow.distributed.cluster.cluster_steps import ClusterSteps
from dflow.distributed.cluster.joined_server import joined_server
from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.cluster.task_metrics import task_metrics
from dflow.distributed.collectives.agreed_programs import AgreedPrograms
from dflow.distributed.collectives.dense_gradients import DenseGradients
from dflow.distributed.collectives.group_messages import JoinGroup
from dflow.distributed.collectives.jax_runtime import JaxRuntime, refuse_late_start
from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.distributed.collectives.process_groups import RETURN_S
from dflow.distributed.collectives.process_mesh import ProcessMesh
from dflow.distributed.coordinator.membership import FINISHED
from dflow.distributed.evaluation.shared_evaluation import SharedEvaluation
from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.metrics import MetricsEndpoint
from dflow.distributed.observe.tracer import Observed, Tracer
from dflow.distributed.process.run_folder import run_folder
from dflow.distributed.process.termination import Terminated
from dflow.distributed.synchronous.round_part import RoundPart
from dflow.distributed.task.task_server import TaskSettings
from dflow.distributed.training.applying import shared_step
from dflow.distributed.training.compared_steps import compare_call
from dflow.distributed.training.comparison_messages import RunRefused
from dflow.distributed.training.open_runs import close_runs
from dflow.distributed.training.strategy import SharedStep
from dflow.distributed.transport.addresses import LOCAL_ADDRESS, TcpAddress, parse_endpoints
from dflow.distributed.transport.base import Transport
from dflow.distributed.transport.loopback import LOOPBACK
from dflow.distributed.wire.messages.coordination import AwaitBarrier, DecideOnce, ElectOnce
from dflow.distributed.wire.messages.roster import EdgeTraffic
from dflow.distributed.wire.messages.snapshots import SnapshotCommitted, StateRestored
from dflow.distributed.wire.messages.status import GetStatus, Report
from dflow.lowering.pipeline import ALONE
from dflow.lowering.queues.timers import Clock
from dflow.lowering.state.store import Store
from dflow.lowering.steps.program_watch import set_program_watch
from dflow.lowering.steps.recorder import Recorder
from dflow.tracing.devices.task_name import short_task_name, split_task_name, task_name
from dflow.tracing.errors import DflowError, StrategyError, TrainingError
from dflow.tracing.near_names import suggests_fields, suggests_keywords
from dflow.tracing.source import caller
from dflow.tracing.state.context import home

#: The job of a process that is in no cluster.
LOCAL_JOB = split_task_name(ALONE)[0]
LOGGER = logging.getLogger("dflow")
#: Least similarity of two job names to suspect a typo, such as wroker for worker.
_ALIKE = 0.83

#: The clusters that this process is a task of now.
_joined: weakref.WeakSet[Cluster] = weakref.WeakSet()


def cluster_with(tasks: Collection[str]) -> Cluster | None:
    """Return the joined cluster that has all of these tasks, else any joined cluster; None if there is none."""
    return next((cluster for cluster in _joined if {*tasks} <= {*cluster.tasks}), next(iter(_joined), None))


@suggests_fields
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


class Cluster:
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
        #: Whether this is the only task for good.
        self.is_standalone = is_standalone
        #: The variables of this process.
        self.store = store
        self._settings = settings
        #: The processes that run the program together, after `start_collectives`, and the programs that they compare.
        self.group: ProcessGroup | None = None
        self.programs: AgreedPrograms | None = None
        self._runtime: JaxRuntime | None = None
        #: Made at the first use; all strategies of the cluster share the compiled steps that write them.
        self._dense: DenseGradients | None = None
        self._endpoints: list[MetricsEndpoint] = []
        #: By run, what differs between its workers.
        self._refusals: dict[str, str] = {}
        #: The names of this process's evaluations.
        self._evaluated: set[str] = set()
        self.coordinator = CoordinatorClient(
            transport, coordinator, name=self.task, timeout_s=settings.join_timeout_s, clock=clock
        )
        #: Writes the newest events to a file when something is stuck.
        self.flights = FlightRecorder(self.task, Recorder(), run_folder(os.environ))
        waits = TaskSettings(wait_timeout_s=settings.step_timeout_s)
        #: The server that runs this task's parts of steps.
        self.server = joined_server(
            self.coordinator, transport, self.task, address, self.flights, store=store, settings=waits
        )
        self.requests = OutgoingRequests(self.server, self.coordinator, settings.request_timeout_s)
        self.steps = ClusterSteps(self.server, self.requests, settings.step_timeout_s)
        session, unsaved = self.coordinator.session, self.requests.unsaved
        session.call_on(RunRefused, lambda notice: self._refusals.update({notice.run: notice.text}))
        session.call_on(StateRestored, lambda notice: self.steps.restored(notice.epoch, notice.undone))
        session.call_on(SnapshotCommitted, lambda notice: unsaved.snapshot_complete())
        try:
            self._await_other_jobs(settings.join_timeout_s)
            # Variables that the script makes get restored values, if there are any.
            self.steps.await_recovery(is_joining=True)
        except BaseException:
            self.server.close()
            self.coordinator.close("could not join")
            raise
        if not is_standalone:
            _joined.add(self)

    def _await_other_jobs(self, timeout_s: float) -> None:
        job, _ = split_task_name(self.task)
        roster = self.coordinator.session.roster
        tasks = {*roster.expected, *(info.task for info in roster.tasks)} - {self.task}
        jobs = {split_task_name(task)[0] for task in tasks}
        # A numbered job, such as worker2 beside worker, is no typo.
        for meant in () if job.rstrip("0123456789") in jobs else get_close_matches(job, jobs, 1, _ALIKE):
            LOGGER.warning("%s has joined as the first of job %r, was %r meant?", self.task, job, meant)
        others = [task for task in roster.expected if split_task_name(task)[0] != job]
        self.coordinator.wait_for_tasks(others, timeout_s=timeout_s)

    def start_collectives(self) -> None:
        """Make the tasks of this job one group, and start JAX's multi-process runtime in all of them.

        raises  DeadlineExceeded naming the tasks that did not do the same; StrategyError if JAX has used a device
        """
        refuse_late_start()
        timeout_s = self._settings.join_timeout_s + RETURN_S
        formed = self.coordinator.ask(JoinGroup(self.task, timeout_s), timeout_s + ANSWER_S)
        self.group = ProcessGroup(self.coordinator, formed, self._settings.step_timeout_s)
        main = parse_endpoints(self.server.address).main
        host = main.host if isinstance(main, TcpAddress) else LOOPBACK
        self._runtime = JaxRuntime(self.group, host, self._settings.join_timeout_s)
        self.programs = AgreedPrograms(self.group)
        set_program_watch(self.programs)

    @property
    def identity(self) -> tuple[str, str]:
        """Identity of the cluster, as long as its coordinator keeps its state, and this task's name."""
        return self.coordinator.session.roster.cluster, self.task

    @property
    def tasks(self) -> tuple[str, ...]:
        """The live tasks, including this one."""
        return self.requests.tasks

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """Values and bytes that this task has sent since its start, per edge."""
        return self.server.traffic()

    @contextmanager
    def parameter_servers(self, job: str = "ps") -> Iterator[None]:
        """Spread the variables made inside over the tasks of `job`, by size.

        The coordinator chooses the task of each, the same for every worker; the first worker to ask creates it. All
        are created together when the block ends, or earlier when one of them is used. An error names the line on
        which its variable was made.
        """
        if self.is_standalone:
            yield
            return
        variables = self.home(job)
        with home(variables), variables.together():
            yield

    def home(self, job: str = "ps") -> ClusterHome:
        """Return the state backend of variables on the tasks of `job`."""
        return ClusterHome(self.requests, self.steps, job)

    def refuse_unequal(self, run: str) -> None:
        """Raise StrategyError if the workers of the run are known to have different steps."""
        if text := self._refusals.get(run):
            raise StrategyError(text)

    @contextmanager
    def shared_steps(
        self,
        run: str,
        prefetch: int,
        max_staleness: int | None = None,
        job: str = "ps",
        *,
        is_one_call: bool = False,
    ) -> Iterator[SharedStep]:
        """Return the context of a loop over steps of `run`, which other workers, if there can be any, run too.

        It gives the context of each step; see `applying.shared_step`, and `StepsAhead` for its arguments and
        `prefetch`, `StalenessBound` for the rest.
        """
        if self.is_standalone:
            yield lambda steps, batches: nullcontext()
            return

        def on_refusal(why: str) -> None:
            if prefetch:
                LOGGER.warning("prefetch=%d has no effect: %s", prefetch, why)

        on_unused = partial(LOGGER.warning, "lookahead=True has no effect: %s")
        on_new = partial(compare_call, self.coordinator, run, is_one_call=is_one_call)
        with self.steps.ahead(run, prefetch, on_refusal, on_unused, on_new) as loop:

            @contextmanager
            def step(steps: range, batches: tuple[Any, Any] | None) -> Iterator[None]:
                self.refuse_unequal(run)
                with self.server.gate.step(self.steps.timeout_s), shared_step(), loop.iteration(steps, batches):
                    yield

            if max_staleness is None:
                yield step
                return
            with StalenessBound(self, run, max_staleness, prefetch, job, loop).taking_part() as bound:
                yield bound.around(step)

    @property
    def epoch(self) -> int:
        """Number of times that all tasks have returned to a snapshot."""
        return self.steps.epoch

    @property
    def undone(self) -> int:
        """Number of these returns that have undone steps."""
        return self.steps.undone

    def await_recovery(self) -> None:
        """Wait until no state of tasks is lost. Raises TaskLost if lost state cannot be restored."""
        self.steps.await_recovery()

    def take_part(self, run: str, job: str, dense: DenseGradients | None = None) -> RoundPart | None:
        """Return this worker's part in a run of synchronous training, whose gradients go to a task of `job`.

        `dense` receives those for variables of this process.

        None in a standalone process, where each step is a round of one worker.
        """
        return None if self.is_standalone else RoundPart(self, run, job, dense)

    def process_mesh(self, axes: Mapping[str, int], batch_axis: str, *, fully_sharded: bool) -> ProcessMesh:
        """Return the mesh over the devices of all processes that compute together, or of a standalone one."""
        return ProcessMesh(axes, batch_axis, fully_sharded=fully_sharded)

    def dense_gradients(self) -> DenseGradients:
        """Return what averages gradients for variables of this process over the processes that compute together."""
        if self._dense is None:
            self._dense = DenseGradients(self.programs)
        return self._dense

    def evaluation(self, name: str, count: int) -> SharedEvaluation | None:
        """Return this task's part in an evaluation of `count` batches; None in a standalone process.

        Raises TrainingError for the name of an earlier one of this process.
        """
        if name in self._evaluated:
            raise TrainingError(
                f"evaluation {name!r}: expected a new name for each evaluation, got one for the second time",
                "put the number of the step into it",
                at=caller(),
            )
        self._evaluated.add(name)
        return None if self.is_standalone else SharedEvaluation(self.requests, self.steps, name, count)

    def colleagues(self) -> tuple[tuple[str, ...], int]:
        """Return the live and expected tasks of this task's job, and their number including tasks that left."""
        roster, (job, _) = self.coordinator.session.roster, split_task_name(self.task)
        here = {info.task: info for info in roster.tasks if split_task_name(info.task)[0] == job}
        coming = {task for task in roster.expected if split_task_name(task)[0] == job}
        live = {task for task, info in here.items() if info.left_at_s is None}
        return tuple(sorted(live | coming)), len({*here} | coming)

    def elect(self, what: str) -> bool:
        """Return whether this task is the one that does `what`: the first live task that asks."""
        return self.coordinator.ask(ElectOnce(what, self.task)).elected

    def decide(self, what: str, value: str | None, timeout_s: float | None = None) -> str | None:
        """Return what was decided by the first task that asked with a value; None if there is none, and none is given.

        Decisions outlive the coordinator's process. A job that goes on from a snapshot, all of whose processes had
        ended, decides again. Raises DeadlineExceeded after `timeout_s`, by default when the coordinator is long away.
        """
        return self.coordinator.ask(DecideOnce(what, self.task, value), timeout_s).value

    @suggests_keywords
    def barrier(self, name: str, *, timeout_s: float = 600.0, fails_on_leave: bool = False) -> tuple[str, ...]:
        """Wait until all members have come to the barrier `name`; return the tasks that passed it.

        Members are the tasks of this one's job that are live or expected at the first arrival. The barrier goes on
        without a member that leaves, or fails if any waiting task set `fails_on_leave`. A task that joins later is
        a member of the next generation.
        raises  DeadlineExceeded naming the missing tasks; TaskLost when the barrier has failed
        """
        arrival = AwaitBarrier(name, self.task, timeout_s=timeout_s, fails_on_leave=fails_on_leave)
        try:
            return self.coordinator.ask(arrival).members
        finally:
            self.steps.state_changed()

    def report(self, name: str, value: float) -> None:
        """Add a result to the closing table of the run."""
        self.coordinator.ask(Report(name, float(value)))

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
        reached: dict[str, Observed] = {self.task: self.server.observer}
        for task in self.tasks:
            if task != self.task:
                with contextlib.suppress(DflowError):
                    reached[task] = self.server.peer(task)
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
        endpoint = MetricsEndpoint(partial(task_metrics, self.server), place)
        self._endpoints.append(endpoint)
        return endpoint.address

    def close(self) -> None:
        """Leave the cluster, after the runs that the program has left open; a second call does nothing."""
        try:
            close_runs(self)
        finally:
            self._leave()

    def _leave(self) -> None:
        while self._endpoints:
            self._endpoints.pop().close()
        _joined.discard(self)
        self._dense = None
        self.steps.state_changed()
        try:
            if self.group is not None and self._runtime is not None:
                set_program_watch(None)
                self.group.close()
                self._runtime.close()
        finally:
            self.group = self.programs = None
            self.coordinator.leave(FINISHED if Terminated.raised is None else Terminated.raised.reason)
            self.server.close()
