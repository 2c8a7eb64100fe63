"""Synchronous training: each update is the average of one gradient from each of several workers.

In a synchronous step (a round, in names), each worker runs the user's step function. Traced under this strategy, its
optimizer gives the gradients to an accumulator on a parameter task, tagged by the round. That task averages the first
`m` of `n` gradients, applies them, drops late ones, and opens the next round (section 4.4 of the OSDI 2016 paper). The
task that holds the accumulator applies the averages, so the death of a worker leaves no update half done.

An opening is an attempt at a round: a round whose update fails is opened again, under another number.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from dflow.distributed.strategies.async_ import Async, StepSource, first_not_finite, real_scalars, refuse_negative
from dflow.distributed.wire.messages import RoundOpen, RoundsDone

_runs = itertools.count()
#: Least time between a worker's reports of its progress.
TELL_S = 0.25


class Stepping(Protocol):
    """Runs steps whose gradients go into the average of a round."""

    def call(self, step: Callable[..., Any], batch: Any, number: int) -> tuple[Any, bool]:
        """Run the step for opening `number`; return its result, and whether its gradients are in the average."""
        ...


class TakesPart(Protocol):
    """A worker's part in a run; see `round_part.Part`."""

    def open(self, step: Callable[..., Any], batch: Any, steps: int, wanted: int) -> Stepping | None:
        """Open the run, or join it if it is open; return None if it is complete."""
        ...

    def next(self, done: int) -> RoundOpen:
        """Wait for the opening after number `done`, the last that this worker has completed (-1 for none)."""
        ...

    def leave(self, done: int) -> None:
        """Leave the run."""
        ...


class Workers(StepSource, Protocol):
    """The part of a cluster that the strategy needs."""

    task: str

    def wanted_gradients(self, backup_workers: int) -> int:
        """Return the number of gradients that end a round. Raises StrategyError if none is left."""
        ...

    def take_part(self, run: str, job: str) -> TakesPart | None:
        """Return this worker's part in a run of synchronous training; None if there is no other worker."""
        ...

    def tell_rounds(self, report: RoundsDone) -> None:
        """Report the progress of a run of synchronous training."""
        ...


class Sync:
    """Runs a training step on every worker in rounds; each round ends with one update of the variables.

    cluster         the result of `dflow.connect()`
    backup_workers  number of gradients that a round does not wait for: the slowest ones, which are dropped
    requeue         whether a batch whose gradient was dropped is used again in the next round instead of lost
    job             the job whose tasks may hold the accumulator
    raises          StrategyError if this many backup workers leave no worker to wait for
    """

    def __init__(self, cluster: Workers, *, backup_workers: int = 0, requeue: bool = False, job: str = "ps") -> None:
        self._cluster, self._wanted = cluster, cluster.wanted_gradients(backup_workers)
        self._requeue, self._job = requeue, job
        #: Numbers of this worker's gradients that are in updates, and that were too late.
        self.accepted = self.dropped = 0

    def run(
        self, step: Callable[..., Any], batches: Iterable[Any], *, steps: int, name: str | None = None
    ) -> Iterator[Any]:
        """Call `step(*batch)` with this worker's own batches, once a round, and yield the result of each call.

        step     a `dflow.jit` function that gives its gradients to one `dflow.Optimizer`, once; it computes them from
                 the variables' values of that round
        batches  tuples of arguments (any other value is passed as the only argument); when they end, the other workers
                 go on without this one
        steps    number of rounds, and so of updates
        name     of the run, the same on every worker; by default, runs are numbered in the order of the program
        raises   StrategyError for a step without gradients, or with several optimizers, or a negative number of
                 rounds; VariableError for variables that are not on tasks, so that no other worker sees them;
                 DeadlineExceeded, naming the workers that gave no gradient
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
                # Wait even without another batch, so that the variables contain this round's update after the loop.
                opening = part.next(done)
                if batch is _END:
                    return
        finally:
            part.leave(done)
            progress.tell()


_END = object()


class _Progress:
    """Reports a worker's progress to the coordinator, at most every `TELL_S`."""

    def __init__(self, cluster: Workers, run: str, total: int) -> None:
        self._cluster, self._run, self._total = cluster, run, total
        self._told_at, self._news = time.monotonic(), RoundsDone(run, cluster.task, 0, total, 0)

    def note(self, rounds: int, step_s: float, metrics: Mapping[str, float], is_dropped: bool) -> None:
        """Note that a step of this worker has ended; `rounds` is the number of rounds that have begun."""
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
        """Report the steps since the last report."""
        self._cluster.tell_rounds(self._news)
        self._told_at = time.monotonic()
        self._news = msgspec.structs.replace(self._news, steps=0, dropped=0, not_finite=None)
