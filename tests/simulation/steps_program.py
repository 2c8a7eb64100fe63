"""The schedule's program of asynchronous training: `Async` claims steps, which run over all tasks.

All steps are alike: each ps sends a value to the worker, the worker sends an update to each ps, and each ps applies it.
The update is the number of the attempt, which identifies the step; the value is the number of updates that the ps has
applied. The programs of the plans only record their calls, as Python callbacks would.
Steps begin ahead on the ps tasks, with a `prefetch` that is the worker's index. In some schedules their staleness is
bounded.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from dflow.distributed.asynchronous.async_ import Async
from dflow.distributed.asynchronous.staleness_bound import SharedStep, StalenessBound
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.snapshots.snapshot_messages import AwaitRecovery
from dflow.distributed.standalone import NoCalls
from dflow.distributed.steps.ahead_rules import AheadRules
from dflow.distributed.steps.retries import RecoveringState
from dflow.distributed.steps.step_identity import LoopSteps
from dflow.distributed.steps.step_starter import StepParts, StepStarter
from dflow.distributed.steps.steps_ahead import BegunStep, RegisteredStep, StepsAhead
from dflow.distributed.training.strategy import StrategyRun
from dflow.distributed.training.work_messages import ClaimSteps
from dflow.distributed.transport.base import Peer, Reply
from dflow.distributed.wire.messages.coordination import AwaitBarrier, ElectOnce
from dflow.distributed.wire.messages.message import Answer, Notice, Request
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable, Unplace
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.steps.local_step import fetched
from dflow.lowering.steps.plan import Call, Item, Plan, Recv, Send
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, TaskLost
from dflow.tracing.moments import reach
from tests.simulation.checks import Attempt, Checks, name_of
from tests.simulation.tasks import Member, SimulatedTasks, programs

RUN = "run"
STEP_S = 9.0
#: Time that a worker computes in a step.
COMPUTE_S = 0.5
#: Interval between two looks of a worker for the end of its step.
LOOK_S = 0.05
#: Longest wait of a worker for the others before it begins.
BARRIER_S = 2.0
CLAIM_S = 3600.0
#: Longest wait until a step may begin where staleness is bounded: longer than it takes to notice a dead worker.
BEGIN_S = 30.0
#: Time that a request to a task takes beside the wait that it asks for.
REQUEST_S = 6.0


class TrainingWorker(RecoveringState):
    """A worker as a `Cluster`, and as its own steps and its own access to the coordinator."""

    is_standalone = False
    clock = NoCalls()

    def __init__(self, member: Member) -> None:
        self.task = member.name
        self.coordinator = self.steps = self
        self._member = member

    def part(self, kind: Any) -> Any:
        """Make a part of the cluster; the parts of the strategies here keep nothing."""
        return kind(self)

    def await_recovery(self) -> None:
        """Wait until no state of tasks is lost."""
        self._member.ask_coordinator(AwaitRecovery(self.task))

    def ask(self, message: Request[Answer], timeout_s: float = 0.0) -> Answer:
        """Ask the coordinator."""
        return self._member.ask_coordinator(message)

    def tell(self, message: Notice) -> None:
        """Send nothing: the time between two reports is real time, so equal schedules would differ."""


class _Starter(StepStarter):
    """Starts steps numbered by simulated time, so that equal schedules have equal numbers."""

    def __init__(self, member: Member) -> None:
        server = member.server
        super().__init__(member.name, server.peers, server.plans, server.runs)
        self._member = member

    def next_step(self) -> StepId:
        return StepId(self._member.name, next(self._member.numbers))


class _SimulatedAsync(Async):
    """Trains on a `StepsWorker`."""

    def _shared_steps(self, run: StrategyRun) -> AbstractContextManager[SharedStep]:
        worker: Any = self.cluster
        return cast(StepsWorker, worker).shared_steps(run.name, self._rules, self._job)


class _BoundTasks(RecoveringState):
    """A worker as the `Cluster` of a bound: its access to the coordinator and to the other tasks."""

    timeout_s = BEGIN_S

    def __init__(self, worker: StepsWorker, member: Member) -> None:
        self.task, self.server = member.name, member.server
        self.coordinator = self.requests = self.steps = self
        self._worker, self._member = worker, member

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """Number of times that all tasks have returned to a snapshot."""
        return self._worker.epoch

    def await_recovery(self) -> None:
        """Wait until no state is lost. Raises TaskLost if lost state cannot be restored."""
        self._worker.await_recovery()

    def ask_waiting(self, task: str, message: Request[Answer], wait_s: float) -> Reply[Answer]:
        """Ask another task, which may wait before it answers."""
        return self._member.ask(short_task_name(task), message, timeout_s=wait_s + REQUEST_S)

    def ask(self, *asked: Any) -> Any:
        """Ask another task, whose name comes first, or the coordinator."""
        match asked:
            case str() as task, message:
                return self.ask_waiting(task, message, 0.0)
            case PlaceVariable() as message, *_:
                return self._worker.placed(message)
            case message, *_:
                return self._worker.ask(message)


class StepsWorker(TrainingWorker):
    """A worker that takes part in the election and runs steps until the run is complete."""

    def __init__(
        self,
        member: Member,
        tasks: SimulatedTasks,
        checks: Checks,
        steps: int,
        ps: Sequence[str],
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(member)
        self._max_staleness = max_staleness
        self.is_complete = False
        #: The attempts at the steps of the last claim, in order.
        self.attempts: list[Attempt] = []
        self._numbers: Iterator[int] = iter(())
        self._tasks = tasks
        self._checks = checks
        self._steps = steps
        self._ps = tuple(ps)
        self._plan = member.server.plans.add(*self.own_plan())
        self._handles: dict[Member, int] = {}
        self._starter = _Starter(member)
        self._unfinished: set[int] = set()
        self._loop = StepsAhead(self._starter, LoopSteps(RUN, self._unfinished), AheadRules())
        self._registered: dict[tuple[int, ...], RegisteredStep] = {}

    @contextmanager
    def shared_steps(self, run: str, rules: AheadRules, job: str) -> Iterator[SharedStep]:
        """Return the context of a loop whose steps begin ahead."""
        steps = LoopSteps(run, self._unfinished, lambda: self.epoch)
        self._loop = StepsAhead(self._starter, steps, rules, clock=lambda: self._tasks.events.now_s)

        @contextmanager
        def step(steps: range, batches: tuple[Any, Any] | None) -> Iterator[None]:
            with self.unpaused(), self._loop.iteration(steps, batches):
                yield

        try:
            if rules.max_staleness is None:
                yield step
            else:
                tasks = cast(Cluster, _BoundTasks(self, self._member))
                bound = StalenessBound(tasks, run, rules.max_staleness, job, self._loop)
                with bound.taking_part(step) as bounded:
                    yield bounded
        finally:
            self._loop.cancel("the loop ended")

    def unpaused(self) -> AbstractContextManager[None]:
        """Return a context that is entered while steps are not paused."""
        return nullcontext()

    def own_plan(self) -> tuple[Plan, list[Program]]:
        """Return this worker's part of a step; its feed is the attempt's number."""
        return _worker_plan(self.task, self._ps, self._computed)

    def plan_of(self, host: str, member: Member) -> tuple[Plan, list[Program]]:
        """Return a ps task's part of a step."""
        updates = partial(self._checks.updates, str(member.process))
        return _ps_plan(host, self.task, lambda: (np.asarray(updates(), np.int32),), partial(self._apply, member))

    def run(self) -> None:
        """Run steps until the coordinator reports the run as complete."""
        while not self.is_complete:
            try:
                self._train()
            except DflowError as error:
                self._member.failed(error)

    def _train(self) -> None:
        member = self._member
        if member.ask_coordinator(ElectOnce("first value", member.name)).elected:
            member.say("makes the first value")
        for host in self._ps:
            self._place_on(host)
        self._await_others()
        prefetch, most = int(member.name.rpartition(":")[2]), self._max_staleness
        prefetch = prefetch if most is None else min(prefetch, most)
        strategy = _SimulatedAsync(cast(Cluster, self), prefetch=prefetch, max_staleness=most)
        for _ in strategy.run(self._step, itertools.repeat(()), steps=self._steps, name=RUN):
            pass
        self.is_complete = True

    def _place_on(self, host: str) -> None:
        """Place a variable on a ps task."""
        self.placed(PlaceVariable(f"variable of {host}", "int32", (), 4, "ps", on=name_of(host)))

    def placed(self, message: PlaceVariable) -> Placed:
        """Place something on a ps task; what was lost with an earlier process is abandoned first."""
        try:
            return self._member.ask_coordinator(message)
        except TaskLost:
            self._member.ask_coordinator(Unplace(message.name))
            raise

    def _await_others(self) -> None:
        """Begin with the others, or alone if they do not arrive in time: they may have begun already."""
        member = self._member
        try:
            passed = member.ask_coordinator(AwaitBarrier("begin", member.name, 0, BARRIER_S))
        except DflowError as error:
            member.say(f"begins without the others: {error}")
        else:
            member.say(f"begins with {len(passed.members)} workers")

    def ask(self, message: Request[Answer], timeout_s: float = 0.0) -> Answer:
        """Claim steps without their times, which are real times; note the attempts of the new claim."""
        if not isinstance(message, ClaimSteps):
            return super().ask(message)
        claimed = self._member.ask_coordinator(replace(message, step_s=0.0), CLAIM_S)
        self.attempts, self._numbers = [], iter(claimed.steps)
        return cast(Answer, claimed)

    def _step(self) -> None:
        """Run the next claimed step over all tasks; after a failure, cancel it on all of them."""
        member, step = self._member, next(self._numbers)
        attempt = self._checks.begin(str(member.process), step)
        self.attempts.append(attempt)
        member.say(f"begins step {step} (attempt {attempt.number})")
        called = self._called()
        begun = self._loop.take(called)
        id = self._starter.next_step() if begun is None else begun.step
        others: dict[str, Peer] = {}
        try:
            others.update((name_of(host), member.server.peer(name_of(host))) for host in self._ps)
            self._run_parts(id, attempt, called, others if begun is None else begun.peers, begun)
        except DflowError as error:
            member.say(f"failed in step {step}")
            self._checks.failed(attempt, str(error))
            self._starter.cancel(id, others.values(), error)
            raise

    def _called(self) -> RegisteredStep:
        """Return the step with the present handles of its plans."""
        handles = {self.task: self._plan, **{name_of(host): self._handle_on(host) for host in self._ps}}
        return self._registered.setdefault((*handles.values(),), RegisteredStep(handles, ()))

    def _run_parts(
        self, id: StepId, attempt: Attempt, called: RegisteredStep, others: Mapping[str, Peer], begun: BegunStep | None
    ) -> None:
        member = self._member
        over = SimpleQueue[Outcome[Fetches]]() if begun is None else begun.outcome
        parts = begun.parts if begun is not None else self._started(id, called, others, over)
        self._loop.begin_more(id, others, called)
        member.sleep(COMPUTE_S)
        self._starter.run_own(id, called.handles, [np.int32(attempt.number)], parts)
        fetched(self._outcome(f"step {attempt.step}", over))

    def _started(
        self, id: StepId, called: RegisteredStep, others: Mapping[str, Peer], over: SimpleQueue[Outcome[Fetches]]
    ) -> StepParts:
        return self._starter.start(id, others, called.handles, over.put, of=self._loop.identities.current)

    def _outcome(self, what: str, over: SimpleQueue[Outcome[Fetches]]) -> Outcome[Fetches]:
        """Wait for the outcome of a step."""
        for _ in range(int(STEP_S / LOOK_S)):
            with contextlib.suppress(Empty):
                return over.get_nowait()
            self._member.sleep(LOOK_S)
        raise DeadlineExceeded(f"waited {STEP_S:g} s for {what}")

    def _handle_on(self, host: str) -> int:
        """Return the handle of the ps's plan in this worker's steps, made at first use; 0 while the ps is down."""
        member = self._tasks.member(host)
        if member is None:
            return 0
        if member not in self._handles:
            reach("registration", self.task)
            self._handles[member] = member.server.plans.add(*self.plan_of(host, member))
        return self._handles[member]

    def _computed(self, number: Any, *values: Any) -> tuple[Any]:
        self._checks.has_values(int(np.asarray(number)), dict(zip(self._ps, map(int, values), strict=True)))
        return (number,)

    def _apply(self, member: Member, number: Any) -> tuple[()]:
        attempt = self._checks.applied(int(np.asarray(number)), str(member.process), self._max_staleness)
        member.say(f"applies step {attempt.step} of {attempt.worker}")
        return ()


def _ps_plan(
    host: str, worker: str, read: Callable[[], tuple[Any]], apply: Callable[[Any], tuple[()]]
) -> tuple[Plan, list[Program]]:
    value, update = _edges(host)
    items: tuple[Item, ...] = (
        Call(0, (), (), (), (0,)),
        Send(value, worker, (0,)),
        Recv(update, worker, (1,), (("i32", ()),)),
        Call(1, (), (), (1,), (), touches_anything=True),
    )
    return Plan(name_of(host), 2, items), programs(read, apply)


def _worker_plan(worker: str, ps: Sequence[str], computed: Callable[..., tuple[Any]]) -> tuple[Plan, list[Program]]:
    """Return the worker's plan over these ps tasks; its feed is the attempt's number."""
    receives = [Recv(_edges(host)[0], name_of(host), (1 + place,), (("i32", ()),)) for place, host in enumerate(ps)]
    made = 1 + len(ps)
    items: tuple[Item, ...] = (
        *receives,
        Call(0, (), (), tuple(range(made)), (made,)),
        *(Send(_edges(host)[1], name_of(host), (made,)) for host in ps),
    )
    return Plan(worker, made + 1, items, feeds=(0,)), programs(computed)


def _edges(host: str) -> tuple[str, str]:
    return f"value of {host}", f"update of {host}"
