"""Synchronous training: each update is the average of one gradient from each of so many workers.

The step is the user's own. Traced under this strategy, its optimizer gives its gradients to an accumulator on a
parameter task, tagged by the round; there the first `m` of `n` are averaged and applied, stale ones are dropped, and
the next round opens (section 4.4 of the OSDI 2016 paper). No worker is special: the task that holds the accumulator
applies the averages, so that no worker's death leaves an update half done.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from dflow.distributed.messages import RoundOpen, RoundsDone
from dflow.distributed.strategies.async_ import Async, StepSource, first_not_finite, real_scalars, refuse_negative

_runs = itertools.count()
#: How often a worker says how it goes, in s.
TELL_S = 0.25


class Stepping(Protocol):
    """Does steps whose gradients go to the average of a round."""

    def call(self, step: Callable[..., Any], batch: Any, number: int) -> tuple[Any, bool]:
        """What the step gives under the number of an opening, and whether its gradients are in the round's average."""
        ...


class TakesPart(Protocol):
    """A worker's part in a run; see `round_part.Part`."""

    def open(self, step: Callable[..., Any], batch: Any, steps: int, wanted: int) -> Stepping | None:
        """Open the run, or find it open; None when it is over."""
        ...

    def next(self, done: int) -> RoundOpen:
        """The opening after that which this worker is `done` with."""
        ...

    def leave(self, done: int) -> None:
        """Take part no more."""
        ...


class Workers(StepSource, Protocol):
    """What the strategy needs of a cluster."""

    task: str

    def wanted_gradients(self, backup_workers: int) -> int:
        """How many gradients end a round, of one from each worker. Raises StrategyError when it is none."""
        ...

    def take_part(self, run: str, job: str) -> TakesPart | None:
        """This worker's part in a run of synchronous training; None where there is no other worker."""
        ...

    def tell_rounds(self, report: RoundsDone) -> None:
        """Say how a run of synchronous training goes."""
        ...


class Sync:
    """Runs a training step on every worker, round by round, each ended by one update of the variables.

    cluster         what `dflow.connect()` gave
    backup_workers  how many of a round's gradients are not waited for: the slowest, which are dropped
    requeue         whether a batch whose gradient was dropped is used again in the next round, rather than lost
    job             the job whose tasks the accumulator may live on
    raises          StrategyError when so many backup workers leave no worker to wait for
    """

    def __init__(self, cluster: Workers, *, backup_workers: int = 0, requeue: bool = False, job: str = "ps") -> None:
        self._cluster, self._wanted = cluster, cluster.wanted_gradients(backup_workers)
        self._requeue, self._job = requeue, job
        #: How many gradients of this worker are in the updates, and how many came too late for theirs.
        self.accepted = self.dropped = 0

    def run(
        self, step: Callable[..., Any], batches: Iterable[Any], *, steps: int, name: str | None = None
    ) -> Iterator[Any]:
        """Call `step(*batch)` with this worker's own batches, once a round, and yield what each call returns.

        step     a `dflow.jit` function that gives its gradients to one `dflow.Optimizer`, once; what these are computed
                 from is of one version, that of the round
        batches  tuples of arguments (anything else is passed as the one argument); when they end, the others go on
                 without this worker
        steps    how many rounds, and so updates, there are in all
        name     of the run, the same on every worker; given none, runs are numbered in the order of the program
        raises   StrategyError for a step without gradients, or with several optimizers, or a negative number of
                 rounds; VariableError for variables that are not on tasks, which no other worker sees;
                 DeadlineExceeded, naming who gave no gradient
        """
        refuse_negative(steps)
        run = name or f"sync_run_{next(_runs)}"
        part = self._cluster.take_part(run, self._job)
        if part is None:
            yield from self._alone(Async(self._cluster).run(step, batches, steps=steps, name=run))
        else:
            yield from self._rounds(part, run, step, iter(batches), steps)

    def _alone(self, outcomes: Iterator[Any]) -> Iterator[Any]:
        for outcome in outcomes:
            self.accepted += 1
            yield outcome

    def _rounds(
        self, part: TakesPart, run: str, step: Callable[..., Any], supply: Iterator[Any], steps: int
    ) -> Iterator[Any]:
        progress, done = _Progress(self._cluster, run, steps), -1
        try:
            batch = next(supply, _END)
            if batch is _END:
                return
            gradients = part.open(step, batch, steps, self._wanted)
            if gradients is None:
                return
            opening = part.next(done)
            while opening.done < steps:
                started = time.perf_counter()
                outcome, is_fresh = gradients.call(step, batch, opening.number)
                step_s, done = time.perf_counter() - started, opening.number
                self.accepted += is_fresh
                self.dropped += not is_fresh
                progress.note(opening.done + 1, step_s, real_scalars(outcome), not is_fresh)
                yield outcome
                batch = batch if self._requeue and not is_fresh else next(supply, _END)
                # Also when there is no more: who reads the variables after the loop finds this round's update in them.
                opening = part.next(done)
                if batch is _END:
                    return
        finally:
            part.leave(done)
            progress.tell()


_END = object()


class _Progress:
    """Tells the coordinator how it goes, now and then."""

    def __init__(self, cluster: Workers, run: str, total: int) -> None:
        self._cluster, self._run, self._total = cluster, run, total
        self._told_at, self._news = time.monotonic(), RoundsDone(run, cluster.task, 0, total, 0)

    def note(self, rounds: int, step_s: float, metrics: Mapping[str, float], is_dropped: bool) -> None:
        """A step of this worker has ended, in a run of which so many rounds have begun."""
        before = self._news
        self._news = RoundsDone(
            self._run,
            self._cluster.task,
            rounds,
            self._total,
            before.steps + 1,
            before.dropped + is_dropped,
            step_s,
            dict(metrics),
            before.not_finite or first_not_finite(rounds - 1, [metrics]),
        )
        if time.monotonic() - self._told_at > TELL_S:
            self.tell()

    def tell(self) -> None:
        """Say what is new."""
        self._cluster.tell_rounds(self._news)
        self._told_at = time.monotonic()
        self._news = msgspec.structs.replace(self._news, steps=0, dropped=0, not_finite=None)
