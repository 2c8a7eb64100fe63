"""The schedule's program of asynchronous training: claiming and running steps, as `Async` and `Cluster` do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dflow.distributed.simulation.checks import Attempt, Checks, name_of
from dflow.distributed.simulation.script import Resolve, Script, Wait, sleep
from dflow.distributed.simulation.tasks import AGAIN_S, ASK_S, Member, Tasks
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.barriers import AwaitBarrier
from dflow.distributed.wire.messages.claims import Claimed, ClaimSteps
from dflow.distributed.wire.messages.elections import Elected, ElectOnce
from dflow.distributed.wire.messages.plans import CancelStep, RunPlan
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DflowError, InternalError, TaskLost

RUN = "run"
STEP_S = 9.0
#: Time that a worker computes in a step.
COMPUTE_S = 0.5
#: Longest wait of a worker for the others before it begins.
BARRIER_S = 2.0
CLAIM_S = 3600.0


class Worker:
    """The program of one worker. `is_complete` is set when the coordinator reports the run as complete."""

    def __init__(self, member: Member, tasks: Tasks, checks: Checks, steps: int, ps: Sequence[str]) -> None:
        self.is_complete = False
        self.attempts: list[Attempt] = []
        self._member = member
        self._tasks = tasks
        self._checks = checks
        self._steps = steps
        self._ps = tuple(ps)
        self._plan = tasks.worker_plan(member, self._ps)

    def script(self) -> Script:
        """Join, take part in the election, and run steps until the run is complete."""
        yield from self._member.join()
        while not self.is_complete:
            try:
                yield from self._run()
            except DflowError as error:
                self._member.say(f"failed: {type(error).__name__}: {error}")
                yield sleep(AGAIN_S)
        yield from self._member.leave()

    def _run(self) -> Script:
        elected = yield self._member.coordinator.ask(ElectOnce("first value", self._member.name), ASK_S)
        if isinstance(elected, Elected) and elected.elected:
            self._member.say("makes the first value")
        yield from self._await_others()
        done, more = 0, True
        while True:
            # The session fills in the claim's number and the number of the claim that it reports.
            claim = ClaimSteps(RUN, self._member.name, self._steps, 0, done=done, more=more)
            claimed = yield self._member.coordinator.ask(claim, CLAIM_S)
            self.attempts = []
            if not isinstance(claimed, Claimed):
                raise InternalError(f"a claim is answered by {type(claimed).__name__}")
            if not more:
                yield sleep(AGAIN_S)
                return
            if claimed.count == 0:
                self.is_complete = True
                return
            done, more = claimed.count, True
            for place in range(claimed.count):
                try:
                    yield from self._step(claimed.first + place)
                except DflowError as error:
                    self._member.say(f"failed in step {claimed.first + place}: {type(error).__name__}: {error}")
                    done, more = place, False
                    break

    def _await_others(self) -> Script:
        """Begin with the others, or alone if they do not arrive in time: they may have begun already."""
        awaits = AwaitBarrier("begin", self._member.name, 0, BARRIER_S)
        try:
            passed = yield self._member.coordinator.ask(awaits, ASK_S)
        except DflowError as error:
            self._member.say(f"begins without the others: {error}")
        else:
            self._member.say(f"begins with {len(passed.members)} workers")

    def _step(self, step: int) -> Script:
        """Run one step over all tasks; after a failure, cancel it on all of them."""
        attempt = self._checks.begin(str(self._member.process), step)
        self.attempts.append(attempt)
        self._member.say(f"begins step {step} (attempt {attempt.number})")
        id = StepId(self._member.name, next(self._member.numbers))
        others: list[Peer] = []
        try:
            others += [self._member.server.peer(name_of(host)) for host in self._ps]
            yield Wait(f"step {step}", STEP_S, lambda resolve: self._start(id, attempt, others, resolve))
        except DflowError as error:
            self._checks.failed(attempt, str(error))
            self._member.server.cancel(id, error)
            for peer in others:
                if not peer.closed:
                    peer.notify(CancelStep(id.origin, id.number, str(error)))
            raise

    def _start(self, id: StepId, attempt: Attempt, others: Sequence[Peer], resolve: Resolve) -> None:
        left = {self._member.process.host, *self._ps}

        def ended(host: str, outcome: object) -> None:
            if isinstance(outcome, BaseException):
                resolve(outcome if isinstance(outcome, DflowError) else TaskLost(str(outcome)))
            left.discard(host)
            if not left:
                resolve(None)

        for host, peer in zip(self._ps, others, strict=True):
            handle = self._tasks.ps_plan(host, self._member.process.host)
            peer.start(RunPlan(handle, id.origin, id.number), on_reply=partial(ended, host))

        def own(outcome: Outcome[Fetches]) -> None:
            ended(self._member.process.host, outcome)

        def run() -> None:
            try:
                self._member.server.run(self._plan, id, [np.int32(attempt.number)], own)
            except DflowError as error:
                ended(self._member.process.host, error)

        self._member.process.after(COMPUTE_S, run)
