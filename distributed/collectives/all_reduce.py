"""Training on one mesh over the devices of all workers: XLA adds up the gradients by its own collectives.

Every process runs the same program, and each step is one computation of all of them. Its batch is divided among the
processes, and its variables are on all devices or divided among them. A process that does another number of steps, or
another step, would leave the others in a collective without end. So before each step the processes tell each other,
through the coordinator, what they are about to do. This costs no time while the devices compute the step before.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
from jax.sharding import Mesh

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.collectives.collectives import Collectives
from dflow.distributed.collectives.process_mesh import ProcessMesh
from dflow.distributed.process.termination import Terminated
from dflow.distributed.training.batch_supply import END, BatchSupply, with_ids_of
from dflow.distributed.training.run_steps import in_step
from dflow.distributed.training.step_report import StepProgress
from dflow.distributed.training.strategy import StepResult, Strategy, StrategyRun, arguments_of
from dflow.tracing.errors import DflowError, StrategyError
from dflow.tracing.near_names import suggests_keywords

LOGGER = logging.getLogger("dflow")


class AllReduce(Strategy):
    """Runs a training step on the devices of all workers together, `steps` times.

    cluster        the result of `dflow.connect(collectives=True)`; of a standalone process, all its devices are used
    axes           sizes of the mesh by the names of its axes; -1 means all remaining devices
    batch_axis     the axis over which batches are divided
    fully_sharded  whether each variable made in `variables()` without a spec is divided over the axis of
                   batches, along its largest dimension that can be; otherwise each device has a copy
    raises         StrategyError for a cluster without collectives, or other axes

    Each worker gives its own part of each batch; the step gets the arrays of all parts together, in the order of the
    workers, so the result is that of one process. Scalars must be the same in all processes. Workers whose devices have
    the same positions along the axis of batches give the same part. A function of batches is given the number
    `step` * n + `index` of n parts, where `index` is the worker's part: see `part`.

    The loop ends in all processes at the same step: when the batches of one of them end, the others leave their batch
    of that step unused, and log that. After SIGTERM to one of them all raise SystemExit with the status 143 before the
    same step, and the end of a `CheckpointManager`'s block saves the step before it. `run` raises StrategyError in all
    processes for batches of different shapes, structures or scalars; TaskLost when a worker has left; DeadlineExceeded
    with the workers that are not ready for a step; and VariableError for optimizers of variables that were not made in
    `variables()`.
    """

    run_prefix = "all_reduce"
    ends_together = True

    @suggests_keywords
    def __init__(
        self,
        cluster: Cluster,
        *,
        axes: Mapping[str, int] | None = None,
        batch_axis: str = "data",
        fully_sharded: bool = False,
    ) -> None:
        collectives = cluster.part(Collectives)
        if collectives.group is None and not cluster.is_standalone:
            raise StrategyError(
                f"{type(self).__name__}: expected a cluster with collectives, got one without",
                "write dflow.connect(collectives=True)",
            )
        super().__init__(cluster)
        self._group, self._programs = collectives.group, collectives.programs
        self._on = ProcessMesh(axes or {"data": -1}, batch_axis, fully_sharded=fully_sharded)
        self._first = 0

    @property
    def mesh(self) -> Mesh:
        """The mesh of all devices of all processes, for shardings and constraints of the program's own."""
        return self._on.mesh

    @property
    def part(self) -> tuple[int, int]:
        """Index of this process's part of each batch, and the number of parts."""
        return self._on.part, self._on.parts

    @property
    def batches_per_step(self) -> int:
        return self._on.parts

    def variables(self) -> AbstractContextManager[None]:
        """Return a context that spreads new variables over the mesh; `sharding` may be a `PartitionSpec` over its axes.

        Each device makes only its part. At the end of the context, raises StrategyError in all processes if they have
        not made the same variables with the same first values.
        """
        return self._on.variables(self._group, self.cluster.store)

    @suggests_keywords
    def run(
        self,
        step: Callable[..., StepResult],
        batches: Iterable[Any] | Callable[[int], Any] | BatchSupply,
        *,
        steps: int,
        name: str | None = None,
        first: int = 0,
    ) -> Generator[StepResult]:
        """As `Strategy.run`, for the steps from number `first` to `steps` - 1.

        first  number of the first step: in a program that goes on from a checkpoint, `next_step` of its
               `CheckpointManager`. A function of batches counts from there; an iterable gives the rest of the batches
        """
        of_run = copy.copy(self)
        of_run._first = first
        return Strategy.run(of_run, step, batches, steps=steps, name=name)

    def results(self, run: StrategyRun) -> Iterator[Any]:
        # To the end of the loop, since the processes end it together.
        with run.guarded_step():
            yield from self._steps(run)

    def _steps(self, run: StrategyRun) -> Iterator[Any]:
        def call(number: int, batch: Any) -> Any:
            arguments = arguments_of(self._on.divided(batch))
            if self._programs is None:
                return run.step(*arguments)
            # All processes compare the programs of the step before they run them.
            with self._on.shared_step(self._programs, _point(run, number), is_one_call=hasattr(run.step, "trace")):
                return run.step(*arguments)

        return self._called(run, call)

    def _called(self, run: StrategyRun, call: Callable[[int, Any], Any]) -> Iterator[Any]:
        """Call each step by `call(number, batch)`, report it as progress, and yield its result.

        Ends when one of the processes has no batch. Raises Terminated in all processes before the same step if SIGTERM
        has come to one, and TaskLost if one has left.
        """
        progress = StepProgress(self.cluster, run.name, run.steps, self._first)
        try:
            for number, batch in enumerate(self._batches(run), self._first):
                with self._computing():
                    with in_step(number - self._first):
                        outcome = call(number, batch)
                    progress.reached(number + 1)
                    progress.note(number, outcome)
                run.opened.is_at_end = progress.is_over
                yield outcome
        except BaseException as error:
            progress.report_failure()
            if isinstance(error, GeneratorExit) and progress.is_over:
                self._end_together(run)
            raise
        with self._computing():
            progress.report()

    def _end_together(self, run: StrategyRun) -> None:
        """Meet the other processes at the end of the run, whose loop the program has left at the last step.

        Ignores errors of dflow. Raises Terminated if SIGTERM has come to one of the processes.
        """
        with contextlib.suppress(DflowError):
            self._told_by_all(run, run.steps, _Ready(stops=run.guard.has_come))

    def _computing(self) -> AbstractContextManager[None]:
        """Return the context of a computation of all processes: if one has left, its error becomes TaskLost."""
        return nullcontext() if self._group is None else self._group.computing()

    def _batches(self, run: StrategyRun) -> Iterator[Any]:
        """Yield this worker's batch for each step, as long as all workers have one.

        Exchanges words with all processes before each step and after the last one. Raises StrategyError for a first
        step outside of the run.
        """
        if not 0 <= self._first <= run.steps:
            raise StrategyError(
                f"run: first: expected a step from 0 to {run.steps}, got {self._first}", "give manager.next_step"
            )
        for number in range(self._first, run.steps):
            batch = run.batches.take(number * self._on.parts + self._on.part)
            if batch is not END:
                batch = with_ids_of(batch)  # before arrays are divided among devices
            if not self._are_all_ready(run, number, batch):
                return
            yield batch
        self._told_by_all(run, run.steps, _Ready(stops=run.guard.has_come))

    def _are_all_ready(self, run: StrategyRun, number: int, batch: Any) -> bool:
        """Exchange with all processes whether each has a batch; return false, and warn, if one has none.

        All processes call it. Raises StrategyError if the batches differ in type, or in value for one part, and
        Terminated if SIGTERM has come to a process.
        """
        described = "" if batch is END else self._on.described(batch)
        checksum = self._on.checksum(batch) if described and self._on.shares_part else 0
        told = self._told_by_all(run, number, _Ready(described, self._on.part, checksum, run.guard.has_come))
        ended = [name for name, one in told.items() if not one.batch]
        if ended and self._group is not None:
            unused = "" if batch is END else "; this worker's batch for the next step is not used"
            LOGGER.warning(
                "run %r ends after %d of %d steps: the batches of %s have ended%s",
                *(run.name, number, run.steps, ", ".join(ended), unused),
            )
        if ended:
            return False
        point = _point(run, number)
        _refuse_unequal(point, {name: one.batch for name, one in told.items()})
        for part in {one.part for one in told.values()} if self._on.shares_part else ():
            sums = {name: f"a batch of checksum {one.checksum}" for name, one in told.items() if one.part == part}
            _refuse_unequal(f"{point}, part {part} of the batch", sums)
        return True

    def _told_by_all(self, run: StrategyRun, number: int, ready: _Ready) -> dict[str, _Ready]:
        """Exchange `ready` with all processes before a step, or after the last one; return each one's by name.

        Raises Terminated in all of them if SIGTERM has come to one. All have then done the same steps, so that they can
        save their state.
        """
        told = {"this process": ready}
        if self._group is not None:
            point = _point(run, number) if number < run.steps else f"the end of run {run.name!r}"
            words = self._group.exchange(point, msgspec.json.encode(ready).decode())
            told = {
                name: msgspec.json.decode(word, type=_Ready)
                for name, word in zip(self._group.names, words, strict=True)
            }
        if stopping := [name for name, one in told.items() if one.stops]:
            reason = f"SIGTERM has come to {', '.join(stopping)}"
            LOGGER.warning("run %r ends after %d of %d steps: %s", run.name, number, run.steps, reason)
            raise Terminated(reason, is_agreed=True)
        return told


class _Ready(msgspec.Struct, frozen=True):
    """The word that a process gives the others before a step.

    batch     description of its batch; empty when its batches have ended
    part      index of its part of the batch
    checksum  of the batch's values, if other processes give the same part; else 0
    stops     whether SIGTERM has come to it
    """

    batch: str = ""
    part: int = 0
    checksum: int = 0
    stops: bool = False


def _point(run: StrategyRun, number: int) -> str:
    return f"step {number} of run {run.name!r}"


def _refuse_unequal(what: str, given: Mapping[str, str]) -> None:
    if len({*given.values()}) > 1:
        described = "; ".join(f"{one}: {text}" for one, text in given.items())
        raise StrategyError(
            f"{what}: expected the same on all workers, got {described}",
            "give batches of the same structure, shapes, dtypes and scalars, and one batch for one part",
        )
