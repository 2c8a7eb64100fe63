"""The schedule's program of asynchronous training: `Async` claims steps, which run over all tasks.

All steps are alike: each ps sends a value to the worker, the worker sends an update to each ps, and each ps applies it.
The update is the number of the attempt, which identifies the step. The programs of the plans only record their calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from dflow.distributed.steps.step_starter import StepParts, cancel_elsewhere
from dflow.distributed.strategies.async_ import Async
from dflow.distributed.strategies.strategy import StrategyCluster
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.coordination import AwaitBarrier, ElectOnce
from dflow.distributed.wire.messages.message import Answer, Notice, Request
from dflow.distributed.wire.messages.plans import RunPlan
from dflow.distributed.wire.messages.rounds import ClaimSteps
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.steps.plan import Call, Item, Plan, Recv, Send
from dflow.tracing.errors import DflowError
from tests.simulation.blocking_program import end_wait
from tests.simulation.checks import Attempt, Checks, name_of
from tests.simulation.tasks import Member, SimulatedTasks, programs

RUN = "run"
STEP_S = 9.0
#: Time that a worker computes in a step.
COMPUTE_S = 0.5
#: Longest wait of a worker for the others before it begins.
BARRIER_S = 2.0
CLAIM_S = 3600.0
_PARAMETER = np.zeros((), np.int32)


class TrainingWorker:
    """A worker as a `StrategyCluster`, and as its own access to the coordinator."""

    def __init__(self, member: Member) -> None:
        self.task = member.name
        self.coordinator = self
        self._member = member

    def shared_step(self) -> AbstractContextManager[None]:
        """Return a context for a step, which has no optimizer here."""
        return nullcontext()

    def ask(self, message: Request[Answer]) -> Answer:
        """Ask the coordinator."""
        return self._member.ask_coordinator(message)

    def tell(self, message: Notice) -> None:
        """Send nothing: the time between two reports is real time, so equal schedules would differ."""


class StepsWorker(TrainingWorker):
    """A worker that takes part in the election and runs steps until the run is complete."""

    def __init__(self, member: Member, tasks: SimulatedTasks, checks: Checks, steps: int, ps: Sequence[str]) -> None:
        super().__init__(member)
        self.is_complete = False
        #: The attempts at the steps of the last claim, in order.
        self.attempts: list[Attempt] = []
        self._numbers: Iterator[int] = iter(())
        self._tasks = tasks
        self._checks = checks
        self._steps = steps
        self._ps = tuple(ps)
        self._plan = member.server.plans.add(*_worker_plan(member.name, self._ps))
        self._handles: dict[Member, int] = {}

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
        self._await_others()
        for _ in Async(cast(StrategyCluster, self)).run(self._step, itertools.repeat(()), steps=self._steps, name=RUN):
            pass
        self.is_complete = True

    def _await_others(self) -> None:
        """Begin with the others, or alone if they do not arrive in time: they may have begun already."""
        member = self._member
        try:
            passed = member.ask_coordinator(AwaitBarrier("begin", member.name, 0, BARRIER_S))
        except DflowError as error:
            member.say(f"begins without the others: {error}")
        else:
            member.say(f"begins with {len(passed.members)} workers")

    def ask(self, message: Request[Answer]) -> Answer:
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
        id = StepId(member.name, next(member.numbers))
        others: dict[str, Peer] = {}
        try:
            others.update((name_of(host), member.server.peer(name_of(host))) for host in self._ps)
            self._run_parts(id, attempt, others)
        except DflowError as error:
            member.say(f"failed in step {step}")
            self._checks.failed(attempt, str(error))
            member.server.runs.cancel(id, error)
            cancel_elsewhere(id, others.values(), error)
            raise

    def _run_parts(self, id: StepId, attempt: Attempt, others: Mapping[str, Peer]) -> None:
        member, future = self._member, Future[Fetches]()
        parts = StepParts((member.name, *others), partial(end_wait, future))
        for host, (task, peer) in zip(self._ps, others.items(), strict=True):
            peer.start(RunPlan(self._handle_on(host), id.origin, id.number), on_reply=partial(parts.ended, task))
        member.sleep(COMPUTE_S)
        member.server.run(self._plan, id, [np.int32(attempt.number)], partial(parts.ended, member.name))
        member.wait(f"step {attempt.step}", STEP_S, future)

    def _handle_on(self, host: str) -> int:
        """Return the handle of the ps's plan in this worker's steps, made at first use; 0 while the ps is down."""
        member = self._tasks.member(host)
        if member is None:
            return 0
        if member not in self._handles:
            plan = _ps_plan(host, self.task, partial(self._apply, member))
            self._handles[member] = member.server.plans.add(*plan)
        return self._handles[member]

    def _apply(self, member: Member, number: Any) -> tuple[()]:
        attempt = self._checks.applied(int(np.asarray(number)), member.process.host)
        member.say(f"applies step {attempt.step} of {attempt.worker}")
        return ()


def _ps_plan(host: str, worker: str, apply: Callable[[Any], tuple[()]]) -> tuple[Plan, list[Program]]:
    value, update = _edges(host)
    items: tuple[Item, ...] = (
        Call(0, (), (), (), (0,)),
        Send(value, worker, (0,)),
        Recv(update, worker, (1,), (("i32", ()),)),
        Call(1, (), (), (1,), ()),
    )
    return Plan(name_of(host), 2, items), programs(lambda: (_PARAMETER,), apply)


def _worker_plan(worker: str, ps: Sequence[str]) -> tuple[Plan, list[Program]]:
    """Return the worker's plan over these ps tasks; its feed is the attempt's number."""
    receives = [Recv(_edges(host)[0], name_of(host), (1 + place,), (("i32", ()),)) for place, host in enumerate(ps)]
    made = 1 + len(ps)
    items: tuple[Item, ...] = (
        *receives,
        Call(0, (), (), tuple(range(made)), (made,)),
        *(Send(_edges(host)[1], name_of(host), (made,)) for host in ps),
    )
    return Plan(worker, made + 1, items, feeds=(0,)), programs(lambda number, *values: (number,))


def _edges(host: str) -> tuple[str, str]:
    return f"value of {host}", f"update of {host}"
