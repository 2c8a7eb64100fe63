"""This process as a task of a cluster: the record that strategies, evaluations and collectives are built on.

Each keeps an object for the cluster, which `Cluster.part` makes and closes. Every wait has a deadline, and its error
names the missing task.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.cluster.cluster_home import ClusterHome
from dflow.distributed.cluster.cluster_steps import ClusterSteps
from dflow.distributed.cluster.job_end import JobEnd
from dflow.distributed.cluster.joined_server import joined_server, task_metrics
from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.coordinator.membership import FINISHED
from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.metrics import MetricsEndpoint
from dflow.distributed.observe.task_observer import TaskObserver
from dflow.distributed.observe.tracer import Tracer
from dflow.distributed.process.run_folder import run_folder
from dflow.distributed.process.termination import Terminated
from dflow.distributed.snapshots.snapshot_messages import SnapshotCommitted, StateRestored
from dflow.distributed.task.task_server import MakePart, TaskSettings
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import Peer, Transport
from dflow.distributed.wire.messages.coordination import AwaitBarrier, DecideOnce, ElectOnce
from dflow.distributed.wire.messages.roster import EdgeTraffic
from dflow.distributed.wire.messages.status import GetStatus, Report
from dflow.lowering.pipeline import ALONE
from dflow.lowering.queues.timers import Clock
from dflow.lowering.state.store import Store
from dflow.lowering.steps.recorder import Recorder
from dflow.tracing.devices.task_name import short_task_name, split_task_name, task_name
from dflow.tracing.errors import DflowError
from dflow.tracing.near_names import suggests_fields, suggests_keywords
from dflow.tracing.state.context import home

#: The job of a process that is in no cluster.
LOCAL_JOB = split_task_name(ALONE)[0]
LOGGER = logging.getLogger("dflow")
#: Least similarity of two job names to suspect a typo, such as wroker for worker.
_ALIKE = 0.83

Part = TypeVar("Part")

#: The clusters that this process is a task of now.
_joined: weakref.WeakSet[Cluster] = weakref.WeakSet()


def cluster_with(tasks: Collection[str]) -> Cluster | None:
    """Return the joined cluster that has all of these tasks, else any joined cluster; None if there is none."""
    return next((cluster for cluster in _joined if {*tasks} <= {*cluster.tasks}), next(iter(_joined), None))


@suggests_fields
@dataclass(frozen=True)
class ClusterSettings:
    """Timeouts of a cluster, in s.

    `join_timeout_s`     until the coordinator answers, and then until the expected tasks of other jobs have joined
    `request_timeout_s`  a read, a write, the creation of a variable, the compilation of a plan on a task
    `step_timeout_s`     one step, from its start until every task has ended its part
    """

    join_timeout_s: float = 60.0
    request_timeout_s: float = 300.0
    step_timeout_s: float = 600.0


class Cluster:
    """This process as the task `/job:<job>/task:<index>` of the cluster whose coordinator is at `coordinator`.

    Construction joins the cluster, and waits for the expected tasks of other jobs; `close` leaves it.

    parts          the parts of its task server; see `task_role.TASK_PARTS`
    store          holds the variables of this task
    address        address that this task listens at
    is_standalone  whether this is the only task for good, so that variables live in this process
    clock          makes the calls of the session with the coordinator; None means a thread
    raises   DeadlineExceeded when the coordinator does not answer, or an expected task of another job does not join: it
             names them and the time waited; RemoteError when a live task has the name
    """

    def __init__(
        self,
        coordinator: str,
        transport: Transport,
        *,
        parts: Sequence[MakePart],
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
        #: The variables of this process, and its connections.
        self.store, self.transport = store, transport
        self.settings = settings
        #: The objects that subjects keep for this cluster, by the function that made each.
        self._parts: dict[Callable[[Cluster], Any], Any] = {}
        self._making = threading.RLock()
        self._closing = ExitStack()
        self.coordinator = CoordinatorClient(
            transport, coordinator, name=self.task, timeout_s=settings.join_timeout_s, clock=clock
        )
        #: Writes the newest events to a file when something is stuck.
        self.flights = FlightRecorder(self.task, Recorder(), run_folder(os.environ))
        waits = TaskSettings(wait_timeout_s=settings.step_timeout_s)
        #: The server that runs this task's parts of steps.
        self.server = joined_server(
            self.coordinator, transport, self.task, address, self.flights, parts, store=store, settings=waits
        )
        self.requests = OutgoingRequests(self.server, self.coordinator, settings.request_timeout_s)
        self.steps = ClusterSteps(self.server, self.requests, settings.step_timeout_s)
        session, unsaved = self.coordinator.session, self.requests.unsaved
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

    @property
    def identity(self) -> tuple[str, str]:
        """Identity of the cluster, as long as its coordinator keeps its state, and this task's name."""
        return self.coordinator.session.roster.cluster, self.task

    @property
    def tasks(self) -> tuple[str, ...]:
        """The live tasks, including this one."""
        return self.requests.tasks

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """Return the values and bytes that this task has sent since its start, per edge."""
        return self.server.traffic()

    @contextmanager
    def parameter_servers(self, job: str = "ps") -> Iterator[None]:
        """Spread the variables made inside over the tasks of `job`, by size.

        The coordinator chooses the task of each, the same for every worker; the first worker to ask creates it. All
        are created together when the block ends, or earlier when one of them is used. An error names the line on
        which its variable was made. Variables of a standalone process stay in this process.
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
        """Return the value decided for `what`, that of the first task that gave one; None if no task did.

        Decisions outlive the coordinator's process. A job that goes on from a snapshot, all of whose processes had
        ended, decides again. Raises DeadlineExceeded after `timeout_s`, by default 600 s.
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

    @suggests_keywords
    def while_running(self, job: str = "worker", *, every_s: float = 0.0) -> Iterator[bool]:
        """Yield False until all tasks of `job` have ended, at intervals of at least `every_s`, and then True once.

        For an evaluator, which is a task of another job: its last iteration sees the final state. A task of the job
        that was lost, or never joined, has ended when none of the job has run for 120 s, or immediately if all have
        joined and `dflow launch` restarts none. Standalone, it is True.
        raises  ConfigError for this task's own job, or a job that the cluster does not have; TransportClosed when the
                coordinator is lost for good
        """
        if self.is_standalone:
            return iter([True])
        return JobEnd(self.coordinator.session, job, split_task_name(self.task)[0]).iterate(every_s)

    def report(self, name: str, value: float) -> None:
        """Add a result to the closing table of the run, in place of an earlier one of that name."""
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
        reached: dict[str, Peer | TaskObserver] = {self.task: self.server.observer}
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

    def serve_metrics(self, address: str | int) -> str:
        """Serve this task's metrics for Prometheus until `close`; return the address. See `MetricsEndpoint`."""
        endpoint = MetricsEndpoint(partial(task_metrics, self.server), address)
        self._closing.callback(endpoint.close)
        return endpoint.address

    def part(self, kind: Callable[[Cluster], Part]) -> Part:
        """Return `kind(self)`, made at the first use and the same ever after.

        `close` calls its method `close`, if it has one, before those of parts made earlier.
        """
        with self._making:
            if kind not in self._parts:
                made = self._parts[kind] = kind(self)
                if (close := getattr(made, "close", None)) is not None:
                    self._closing.callback(close)
            return self._parts[kind]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the parts and the metrics, and leave the cluster; a second call does nothing."""
        try:
            self._closing.close()
        finally:
            self._parts.clear()
            _joined.discard(self)
            self.steps.state_changed()
            self.coordinator.leave(FINISHED if Terminated.raised is None else Terminated.raised.reason)
            self.server.close()
