"""Asynchronous training: each worker reads, computes and applies at its own pace.

No worker waits for another. A worker's gradient is applied to the present values of the variables, which may be a few
updates newer than the values that it read (section 4.4 of the OSDI 2016 paper). Other workers do the steps that a lost
worker had claimed but not done.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from dflow.distributed.asynchronous.staleness_bound import SharedStep, StalenessBound
from dflow.distributed.asynchronous.worker_claims import claimed
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.steps.ahead_rules import AheadRules
from dflow.distributed.training.applying import shared_step
from dflow.distributed.training.batch_supply import END
from dflow.distributed.training.compared_steps import ComparedSteps
from dflow.distributed.training.step_report import REPORT_S, first_not_finite, losses_of, real_metrics
from dflow.distributed.training.strategy import Strategy, StrategyRun, arguments_of
from dflow.distributed.training.work_messages import ClaimSteps, StepsDone
from dflow.distributed.wire.messages.status import NotFinite
from dflow.tracing.errors import DflowError, StepEnded, TaskLost
from dflow.tracing.near_names import suggests_keywords

LOGGER = logging.getLogger("dflow")


class Async(Strategy):
    """Runs a training step on every worker until all workers together have done `steps` steps.

    A worker's step reads the variables as soon as the worker's previous update is applied. So it costs one round trip
    of the network, where the same function called in a plain loop costs two. A function of batches is given the number
    of the step, from 0 to `steps` - 1: each is used once, by the worker that does this step.

    prefetch       number of the worker's own newest updates that a step may lack, at least 0. With 1, the values for a
                   step are fetched while the previous step computes, rows of tables only with `lookahead`; its
                   gradients are then one update older. It has no effect, with a warning, on steps that call several
                   functions with variables on other tasks, or one with branches or loops there, and where
                   `max_staleness` is too small for it
    lookahead      whether each batch is taken one step early, so that the ids of its lookups are at the tables when
                   their rows may be read: with `prefetch=0` after this worker's update, which costs no staleness, and
                   with 1 while the previous step computes. No batch is taken for a step that is not claimed. It has no
                   effect, with a warning, where `prefetch` has none; on a function that sends nothing that its
                   arguments alone determine, that donates them, or has branches or loops; and if it is not called with
                   arrays of the batch as they are
    max_staleness  largest number of updates by other steps, also by those of this worker, between a step's reads and
                   its own update; the same for all workers of a run. A step waits until it can stay within the bound:
                   with 0, one step runs at a time. None sets no bound, and costs nothing
    job            the job whose tasks hold the variables made in `variables()`; one of them counts the steps, with
                   `max_staleness`
    raises         StrategyError for a negative number, and for a `prefetch` above `max_staleness`; `run` raises
                   DeadlineExceeded, naming the workers whose steps a step waits for
    """

    run_prefix = "run"

    @suggests_keywords
    def __init__(
        self,
        cluster: Cluster,
        *,
        prefetch: int = 0,
        lookahead: bool = False,
        max_staleness: int | None = None,
        job: str = "ps",
    ) -> None:
        super().__init__(cluster)
        self._rules, self._job = AheadRules(prefetch, lookahead, max_staleness), job

    def results(self, run: StrategyRun) -> Iterator[Any]:
        with self._shared_steps(run) as step_of:
            yield from self._steps(run, step_of)

    def _shared_steps(self, run: StrategyRun) -> AbstractContextManager[SharedStep]:
        is_one_call = hasattr(run.step, "trace")
        return shared_steps(self.cluster, run.name, self._rules, self._job, is_one_call=is_one_call)

    def _steps(self, run: StrategyRun, step_of: SharedStep) -> Iterator[Any]:
        coordinator, task, state = self.cluster.coordinator, self.cluster.task, self.cluster.steps
        rules = self._rules
        claim = ClaimSteps(run.name, task, run.steps, max_staleness=rules.max_staleness, least=rules.least_claim)
        steps = claimed(coordinator, claim).steps
        reported_s = time.monotonic()
        # The batch of the step that runs, and the number of failures of this step.
        pending: list[Any] = []
        failures = 0
        while steps:
            done, epoch, undone = _ClaimWork(steps.start), state.epoch, state.undone
            try:
                for number in steps:
                    batch, batches = self._batches(run, number, steps)
                    if batch is END:
                        break
                    started, pending, is_done = time.perf_counter(), [batch], False
                    step = step_of(range(number, steps.stop), batches)
                    with contextlib.suppress(StepEnded), step, run.guarded_step():
                        try:
                            outcome = run.step(*arguments_of(batch))
                        except StepEnded:
                            raise
                        except BaseException:
                            # Before a pause that waits for the end of this step: it may be applied in part.
                            coordinator.tell(StepsDone(run.name, task, steps.start, done.count, has_failed=True))
                            raise
                        done.note(time.perf_counter() - started, outcome)
                        pending, failures, is_done = [], 0, True
                    if not is_done:  # an earlier attempt has ended everywhere, and was not reported
                        run.batches.put_back(*pending)
                        pending, failures = [], 0
                        done.note_ended()
                        continue
                    # The last one's now: a program that has all results need not come back for more. That of a claim of
                    # one too: pauses may wait for it.
                    run.opened.is_at_end = number + 1 == run.steps
                    is_due = len(steps) == 1 or time.monotonic() - reported_s > REPORT_S
                    if run.opened.is_at_end or is_due:
                        coordinator.tell(StepsDone(run.name, task, steps.start, done.count, *done.progress()))
                        reported_s = time.monotonic()
                    yield outcome
            except BaseException as error:
                failures += 1
                is_loss = pending and (isinstance(error, TaskLost) or state.epoch != epoch)
                if is_loss and state.is_recovered(error, failures, epoch):
                    # After a return to a snapshot, the steps done since are repeated, if there were any.
                    count = done.count if state.undone == undone else 0
                    run.batches.put_back(*pending)
                    steps = claimed(coordinator, replace(claim, done=count)).steps
                    continue
                # The loop was left, or a step or a batch failed: return the steps not done here to other workers.
                found = None
                with contextlib.suppress(Exception):  # reading a loss of a failed step raises
                    found = done.not_finite()
                left = replace(claim, done=done.count, more=False, not_finite=found, has_failed=True)
                with contextlib.suppress(DflowError):
                    claimed(coordinator, left)
                raise
            step_s, metrics, not_finite = done.progress()
            is_whole = done.count == len(steps)
            news = replace(claim, done=done.count, step_s=step_s, metrics=metrics, more=is_whole, not_finite=not_finite)
            steps = claimed(coordinator, news).steps

    def _batches(self, run: StrategyRun, number: int, steps: range) -> tuple[Any, tuple[Any, Any] | None]:
        """Return a step's batch, and a pair of it and the next batch if `lookahead` takes that early; else None."""
        if not self._rules.lookahead:
            return run.batches.take(number), None
        run.batches.take_early(number)  # which copies it: an iterator may use its memory for the next one
        batch = run.batches.take(number)
        following = run.batches.take_early(number + 1) if number + 1 in steps and batch is not END else END
        return batch, None if following is END else (batch, following)


@contextmanager
def shared_steps(cluster: Cluster, run: str, rules: AheadRules, job: str, *, is_one_call: bool) -> Iterator[SharedStep]:
    """Yield the function that returns the context of each step in a loop over `run`, which other workers may run too.

    Its first argument has the number of the step in the run, and the numbers of the loop's next steps as far as they
    are known; the second, if not None, the batches of the step and of the next one. State that a step changes on other
    tasks is changed once, however often the step is tried. In a standalone process the contexts do nothing.

    rules        when steps begin on other tasks. With `max_staleness`, a step's context waits until the step may begin,
                 and raises DeadlineExceeded
    job          the job of the task that counts the steps for `max_staleness`
    is_one_call  whether each step is one call of a function of `dflow.jit`, so that all workers call the same

    What the steps write is compared with what those of the other workers write; a context raises StrategyError if it
    differs.
    """
    if cluster.is_standalone:
        yield lambda steps, batches: nullcontext()
        return

    compared = cluster.part(ComparedSteps)
    on_new = partial(compared.compare_call, run, is_one_call=is_one_call)
    with cluster.steps.ahead(run, rules, LOGGER.warning, on_new) as loop:

        @contextmanager
        def step(steps: range, batches: tuple[Any, Any] | None) -> Iterator[None]:
            compared.refuse_unequal(run)
            with cluster.server.gate.step(cluster.steps.timeout_s), shared_step(), loop.iteration(steps, batches):
                yield

        if rules.max_staleness is None:
            yield step
            return
        with StalenessBound(cluster, run, rules.max_staleness, job, loop).taking_part(step) as bounded:
            yield bounded


@dataclass
class _ClaimWork:
    """The steps of a claim that are done.

    first    number of the first step that is not reported
    count    number of steps done, reported or not
    times    durations of the unreported steps, in s
    losses   losses of each unreported step, by name
    outcome  result of the newest step
    """

    first: int
    count: int = 0
    times: list[float] = field(default_factory=list)
    losses: list[Mapping[str, Any]] = field(default_factory=list)
    outcome: Any = None

    def note(self, step_s: float, outcome: Any) -> None:
        """Record a finished step of the claim: its duration and its result, whose losses the next report checks."""
        self.count += 1
        self.times.append(step_s)
        self.losses.append(losses_of(outcome))
        self.outcome = outcome

    def note_ended(self) -> None:
        """Count a step as done that an earlier attempt has ended on all tasks."""
        self.count += 1
        self.losses.append({})

    def not_finite(self) -> NotFinite | None:
        """Return the first loss since the last report that is not finite; None if all are. Waits for their values.

        Raises the error of a step that failed.
        """
        return first_not_finite(enumerate(self.losses, self.first))

    def progress(self) -> tuple[float, dict[str, float], NotFinite | None]:
        """Return the median duration of unreported steps, the newest metrics and `not_finite()`; begin a new report."""
        step_s = statistics.median(self.times) if self.times else 0.0
        found = step_s, real_metrics(self.outcome), self.not_finite()
        self.first += len(self.losses)
        self.times.clear()
        self.losses.clear()
        return found
