"""Synchronous training: each update is the average of one gradient from each of several workers.

In a synchronous step (a round, in names), each worker runs the user's step function. Traced under this strategy, its
optimizer gives each gradient to an accumulator on the task of its variable, tagged by the round. One parameter task,
the host, chooses the first `m` of `n` gradients, has all tasks apply the averages of theirs, drops late ones, and opens
the next round (section 4.4 of the OSDI 2016 paper). The host starts the update, so the death of a worker leaves none
half done; see `round_gradients.py`.

An opening is an attempt at a round: a round whose update fails is opened again, under another number.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from dflow.distributed.asynchronous.async_ import Async
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.synchronous.round_part import RoundPart
from dflow.distributed.training.batch_supply import END, BatchSupply
from dflow.distributed.training.metric_states import states
from dflow.distributed.training.step_report import StepProgress, real_scalars
from dflow.distributed.training.strategy import Strategy, StrategyRun
from dflow.tracing.devices.task_name import split_task_name
from dflow.tracing.errors import DflowError, StrategyError, TaskLost
from dflow.tracing.near_names import suggests_keywords


class Sync(Strategy):
    """Runs a training step on every worker in `steps` rounds; each round ends with one update of the variables.

    cluster         the result of `dflow.connect()`
    backup_workers  number of gradients that a round does not wait for: the slowest ones, which are dropped
    requeue         whether a batch whose gradient was dropped is used again in the next round instead of lost
    elastic         whether rounds go on without a worker that has died until its next process comes, which leaves its
                    batches out; False: the open round waits for that process, so that all batches are used
    job             the job whose tasks hold the variables made in `variables()`; one of these tasks hosts the run
    raises          StrategyError if this many backup workers leave no worker to wait for

    A function of batches is given the number `round` * n + `index` of n workers, where `index` is the worker's. The
    step gives gradients to each `dflow.Optimizer` once, and computes them from the variables' values of its round; an
    update has those of all optimizers, or none. `run` raises StrategyError for a step without gradients, or that
    gives them several times; DeadlineExceeded, naming the workers that gave no gradient.
    """

    run_prefix = "sync_run"
    compiles_steps = True

    @suggests_keywords
    def __init__(
        self, cluster: Cluster, *, backup_workers: int = 0, requeue: bool = False, elastic: bool = True, job: str = "ps"
    ) -> None:
        workers = cluster.colleagues()[1]
        if not 0 <= backup_workers < workers:
            raise StrategyError(
                f"backup_workers={backup_workers} of {workers} worker{'s' if workers != 1 else ''} leaves none whose "
                f"gradient is waited for",
                f"give a number from 0 to {workers - 1}",
            )
        super().__init__(cluster)
        self._wanted, self._requeue, self._job = workers - backup_workers, requeue, job
        #: Whether rounds go on without a worker that has died.
        self.elastic = elastic
        #: Numbers of this worker's gradients that are in updates, and that were too late.
        self.accepted = self.dropped = 0

    @property
    def has_backup_workers(self) -> bool:
        """Whether a round ends before all workers have given their gradients."""
        return self._wanted < self.cluster.colleagues()[1]

    @property
    def batches_per_step(self) -> int:
        return self.cluster.colleagues()[1]

    def results(self, run: StrategyRun) -> Iterator[Any]:
        if self._requeue and run.batches.is_numbered:
            raise StrategyError(
                "requeue=True: expected an iterable of batches, got a function, which gives each round its own",
                "leave requeue out, or give an iterable",
            )
        if not self.cluster.is_standalone:
            yield from self._rounds(RoundPart(self.cluster, run.name, self._job, is_elastic=self.elastic), run)
            return
        # Each step is a round of one worker.
        for outcome in Async(self.cluster).results(run):
            self.accepted += 1
            yield outcome

    def _rounds(self, part: RoundPart, run: StrategyRun) -> Iterator[Any]:
        progress, done = StepProgress(self.cluster, run.name, run.steps), -1
        batches, failures, has_failed = _RoundBatches(run.batches, self.cluster, run.steps), 0, False
        try:
            while batches.newest is not END:
                state = self.cluster.steps
                epoch = state.epoch
                progress.begin()
                try:
                    gradients = part.open(run.step, batches.newest, run.steps, self._wanted)
                    if gradients is None:
                        # The coordinator may not know: the report of the last round may be lost with its worker.
                        progress.reached(run.steps)
                        return
                    opening = part.next(done)
                    while opening.done < run.steps:
                        batch, started = batches.of(opening.done), time.perf_counter()
                        with run.guarded_step():
                            outcome, is_fresh = part.run_step(gradients, run.step, batch, opening)
                            step_s, done = time.perf_counter() - started, opening.number
                            self.accepted += is_fresh
                            self.dropped += not is_fresh
                            progress.reached(opening.done)
                            metrics, is_late = real_scalars(outcome) | states(outcome), not is_fresh
                            progress.note(opening.done, metrics, step_s=step_s, is_dropped=is_late)
                        following = None
                        if opening.done + 1 >= run.steps:
                            # Before the last result: a program that has it need not come back for more.
                            try:
                                following = part.next(done)
                            except DflowError:
                                yield outcome
                                raise
                            run.opened.is_at_end = following.done >= run.steps
                            progress.reached(following.done)
                            progress.report()
                        yield outcome
                        if is_fresh or not self._requeue:
                            batches.take(opening.done + 1)
                        # Wait even without another batch: after the loop the variables have this round's update.
                        opening, failures = following or part.next(done), 0
                        progress.reached(opening.done)
                        if batches.newest is END:
                            return
                    return
                except DflowError as error:
                    # After a return to a snapshot the openings and accumulators from before it are no more.
                    is_loss = isinstance(error, TaskLost) or state.epoch != epoch
                    failures += 1
                    if batches.is_taking or not is_loss or not state.is_recovered(error, failures, epoch):
                        raise
                    if state.epoch != epoch:
                        failures = 0
                    done = -1
        except GeneratorExit:  # the program has left the loop
            raise
        except BaseException:
            has_failed = True
            raise
        finally:
            # A worker that fails is waited for, where its part of a batch may not be left out.
            if self.elastic or not has_failed:
                part.leave(done)
            progress.report()


class _RoundBatches:
    """This worker's batches by round; `newest` is the last one taken, END if there are no more."""

    def __init__(self, supply: BatchSupply, cluster: Cluster, rounds: int) -> None:
        self._supply, self._rounds = supply, rounds
        self._index, self._workers = split_task_name(cluster.task)[1], cluster.colleagues()[1]
        #: Whether the program's code runs, whose errors are not those of a step.
        self.is_taking = False
        self._round, self.newest = 0, END
        self.take(0)

    def take(self, number: int) -> None:
        """Set `newest` to the batch of round `number` if a function gives batches, else to the iterable's next one.

        Does nothing after the last round of a function.
        """
        if self._supply.is_numbered and number >= self._rounds:
            return
        self.is_taking = True
        self._round, self.newest = number, self._supply.take(number * self._workers + self._index)
        self.is_taking = False

    def of(self, number: int) -> Any:
        """Return the batch for round `number`; of an iterable, the one that was taken last."""
        if self._supply.is_numbered and number != self._round:
            self.take(number)
        return self.newest
