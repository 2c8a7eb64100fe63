"""The training strategies' base: the loop that a program runs, and the checks of its arguments."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.process.termination import Terminated, TerminationGuard, held_back_in_steps
from dflow.distributed.training.batch_supply import END, BatchSupply
from dflow.distributed.training.compiled_step import compiled
from dflow.distributed.training.open_runs import OpenRun, OpenRuns
from dflow.distributed.training.run_steps import in_step
from dflow.tracing.accepted_faults import SHORT, is_accepted
from dflow.tracing.errors import (
    DflowError,
    GraphTypeError,
    InputError,
    InternalError,
    RemoteError,
    StrategyError,
    VariableShapeError,
)
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.source import hide_own_frames

#: Type of the results of the program's step, which its loop yields.
StepResult = TypeVar("StepResult")

#: dflow's errors for the data that a step was given, beside those of the program's functions and of JAX.
_OF_DATA = (InputError, GraphTypeError, VariableShapeError, RemoteError)
#: Number of runs that the program did not name, by worker and prefix. Several workers may be threads of one process.
_run_counts: Counter[tuple[Hashable, str]] = Counter()


@dataclass(frozen=True)
class StrategyRun:
    """One run of a strategy in this process: its name, and the arguments of `Strategy.run`.

    guard   holds SIGTERM back within the context `guarded_step()`; each step is called in such a context
    opened  `is_at_end` of it is set before the result of the last step is yielded, if the last step is known
    """

    name: str
    steps: int
    step: Callable[..., Any]
    batches: BatchSupply
    guard: TerminationGuard
    opened: OpenRun
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False)

    @contextmanager
    def guarded_step(self) -> Iterator[None]:
        """Return the context of one step: SIGTERM waits for its end, and a trace within it is one during the run."""
        with self.guard.step(), in_step(next(self._numbers)):
            yield

    def calls(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Take a batch for each number, call the step with it, and yield the result of each call.

        Ends with the numbers or with the batches. SIGTERM ends the program between two calls. A `Sequence` of numbers
        tells which call is the last: `opened.is_at_end` is set before its result is yielded.
        """
        for number in numbers:
            if (batch := self.batches.take(number)) is END:
                return
            with self.guarded_step():
                outcome = self.step(*arguments_of(batch))
            self.opened.is_at_end = isinstance(numbers, Sequence) and number == numbers[-1]
            yield outcome


class Strategy:
    """Decides when the gradients of a worker's steps are applied; `run` is the training loop.

    A subclass in a program calls `Strategy.__init__` and defines `results`, the loop of one worker. `run_prefix` begins
    the names of runs that the program does not name, as in `run_0`.
    """

    run_prefix: ClassVar[str] = "run"
    #: Whether the loops of all workers end after the same step.
    ends_together: ClassVar[bool] = False
    #: Whether a step is one program, so that a step of plain Python is compiled, also in a standalone process.
    compiles_steps: ClassVar[bool] = False
    #: The job whose tasks hold the variables.
    _job = "ps"

    def __init__(self, cluster: Cluster) -> None:
        #: The cluster whose workers train.
        self.cluster = cluster

    def results(self, run: StrategyRun) -> Iterator[Any]:
        """Yield the result of each step that this worker does in the run: a subclass defines it.

        It calls the steps by `run.calls`, or each step within `run.guarded_step()`. Here it raises StrategyError.
        """
        raise StrategyError(f"{type(self).__name__}: expected a method results, got none", "define results(self, run)")

    def variables(self) -> AbstractContextManager[None]:
        """Return a context that places new variables where this strategy needs them; by default on the parameter tasks.

        A program that creates its model in it changes the strategy in one line.
        """
        return self.cluster.parameter_servers(self._job)

    @property
    def batches_per_step(self) -> int:
        """Number of batches that one step of a run uses, n: step `s` uses batches `s` * n to (`s` + 1) * n - 1.

        The trainer numbers its batches and counts its steps with it. Override it in a strategy that numbers its batches
        differently.
        """
        return 1

    @suggests_keywords
    def run(
        self,
        step: Callable[..., StepResult],
        batches: Iterable[Any] | Callable[[int], Any] | BatchSupply,
        *,
        steps: int,
        name: str | None = None,
    ) -> Generator[StepResult]:
        """Call `step(*batch)` with this worker's own batches, and yield the result of each call.

        step     a `dflow.jit` function, or a Python function: `Sync` and `Hybrid` compile that as `dflow.jit` does, the
                 others call it as it is. A scalar or a dict of scalars that it returns is shown as its progress
        batches  tuples of arguments (any other value is passed as the only argument); when they end or the program
                 leaves the loop, the run ends for this worker, and the other workers go on without it. A standalone
                 process raises StrategyError when they end before the steps are done, unless `DFLOW_ACCEPT=short`. Or a
                 function that returns the batch of a number, the same on every worker and in every process; the class
                 defines the numbers. A step that is done again then uses the same batch
        steps    number of steps; the class defines what it counts
        name     of the run, the same on every worker; by default, runs are numbered in the order of the program
        After SIGTERM, if the program does not handle it, the loop ends with the step that runs: it reports the steps
        that are done, leaves the cluster, and raises SystemExit with the status 143.

        raises   from the loop, not from this call: StrategyError for other values of `step` and `batches`, and for
                 `steps` that are no integer of at least 0; VariableError when the optimizer of a step has variables
                 that are not on tasks, so that no other worker sees them; the errors that the class lists;
                 StrategyError if the program closes the cluster in the loop, before the last step
        """
        opened = OpenRun()
        return self.cluster.part(OpenRuns).add(self._loop(step, batches, steps, name, opened), opened)

    def _loop(
        self, step: Callable[..., Any], batches: Any, steps: int, name: str | None, opened: OpenRun
    ) -> Generator[Any]:
        if not callable(step):
            raise StrategyError(
                f"run: expected a function for step, got {step!r}", "give the step first, and then the batches"
            )
        try:
            count = operator.index(steps)
        except TypeError:
            raise StrategyError(
                f"run: expected an integer for steps, got {steps!r}", "write int(...) around it"
            ) from None
        if count < 0:
            raise StrategyError(f"steps={steps} of a run is negative", "give 0 or more, of all workers together")
        supply = batches if isinstance(batches, BatchSupply) else BatchSupply(batches)
        run = name or run_name(self.cluster, self.run_prefix)
        step = compiled(step) if self.compiles_steps else step
        try:
            yield from opened.of(run, self._guarded(run, count, step, supply, opened))
        except Exception as error:
            if not isinstance(error, InternalError):
                hide_own_frames(error)
            if supply.newest and (isinstance(error, _OF_DATA) or not isinstance(error, DflowError)):
                error.add_note(f"  run {run!r}: {supply.newest}")
            raise

    def _guarded(
        self, run: str, count: int, step: Callable[..., Any], supply: BatchSupply, opened: OpenRun
    ) -> Generator[Any]:
        """Yield the results of the steps. SIGTERM ends the program between two steps, and this task leaves the cluster.

        Raises StrategyError in a standalone process if the batches end before the steps, unless `supply.may_end` or
        `DFLOW_ACCEPT=short` accepts it.
        """
        with held_back_in_steps() as guard:
            try:
                yield from self.results(StrategyRun(run, count, step, supply, guard, opened))
            except Terminated as terminated:
                if not terminated.is_agreed:
                    self.cluster.coordinator.leave(terminated.reason)
                raise
        is_short = supply.has_ended and not supply.may_end and self.cluster.is_standalone
        if is_short and not is_accepted(SHORT):
            raise StrategyError(
                f"run {run!r}: expected batches for {count} steps, got {supply.count}, after which they have ended",
                "give more, such as dflow.data.batches(..., epochs=None), or ask for fewer steps; DFLOW_ACCEPT=short "
                "accepts it",
            )


def run_name(cluster: Cluster, prefix: str) -> str:
    """Count another run that the program does not name; return a name for it, such as `sync_run_0`.

    Workers that begin their runs in the same order get the same names.
    """
    counted = cluster.identity, prefix
    _run_counts[counted] += 1
    return f"{prefix}_{_run_counts[counted] - 1}"


def arguments_of(batch: Any) -> Sequence[Any]:
    """Return the arguments of a step: the batch if it is a tuple, else the batch as the only argument."""
    return batch if isinstance(batch, tuple) else (batch,)
