"""Training with tables on parameter tasks and dense layers in the workers, in one step function.

Each worker runs the step on its own batch, with its own copy of the dense layers. The gradients of the tables go
to their tasks as in synchronous training, so that only the rows that were looked up travel; those of the dense layers
are averaged by a collective of the workers. Both are applied once for each step, by the mean over all workers, before
the next step reads anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.collectives.all_reduce import AllReduce
from dflow.distributed.collectives.dense_gradients import DenseGradients
from dflow.distributed.synchronous.round_messages import RoundOpen
from dflow.distributed.synchronous.round_part import RoundPart
from dflow.distributed.training.strategy import StrategyRun
from dflow.tracing.errors import DflowError, InternalError, TaskLost
from dflow.tracing.near_names import suggests_keywords


class Hybrid(AllReduce):
    """Runs a training step on every worker; dense layers are in each worker, and tables on parameter tasks.

    cluster  the result of `dflow.connect(collectives=True)`
    job      the job whose tasks have the tables

    Tables are made within `cluster.parameter_servers()`, and the other variables within `variables()`, where each
    worker has a copy on its first device. Floating-point variables of `variables()` that the step itself writes, such
    as the statistics of a batch norm, have the mean over the workers after each step. Each kind has its own optimizer,
    and the step gives gradients to each once. All else is as in `AllReduce`, but the step sees the worker's own part of
    the batch alone: the result is that of one process with all parts if the loss is a mean over the batch.
    `run` also raises StrategyError for a step that gives no gradients to tables: train that by `AllReduce`.
    """

    run_prefix = "hybrid"
    compiles_steps = True

    @suggests_keywords
    def __init__(self, cluster: Cluster, *, job: str = "ps") -> None:
        super().__init__(cluster)
        self._job, self._dense = job, cluster.part(DenseGradients)

    def variables(self) -> AbstractContextManager[None]:
        return self._on.copies(self._group, self.cluster.store, self._dense.copies)

    def _steps(self, run: StrategyRun) -> Iterator[Any]:
        if self.cluster.is_standalone:
            yield from super()._steps(run)
            return
        part = self._part(run.name)
        gradients, opening, epoch = None, RoundOpen(-1, 0), self.cluster.steps.epoch

        def call(number: int, batch: Any) -> Any:
            nonlocal gradients, opening
            with self._refusing_return(run.name, epoch):
                if gradients is None:
                    gradients = part.open(run.step, batch, run.steps - self._first, self._on.parts)
                    opening = part.next(-1)
                if gradients is None:
                    raise InternalError(f"the rounds of run {run.name!r} are over before its first step")
                outcome, _ = part.run_step(gradients, run.step, batch, opening)
                self._refuse_return(run.name, epoch)
                self._dense.apply_means(part.kept)
                # Before the loop goes on: then the tables have this step's update.
                opening = part.next(opening.number)
            return outcome

        try:
            yield from self._called(run, call)
        finally:
            if gradients is not None:
                part.leave(opening.number)

    def _part(self, run: str) -> RoundPart:
        """Return this worker's part in the rounds of its group, in a run that no other group or cluster has.

        After a death the next group begins with the tables of the checkpoint. So does a job that goes on from a
        snapshot, which has the rounds of the earlier cluster.
        """
        assert self._group is not None  # this process is not standalone
        cluster, _ = self.cluster.identity
        return RoundPart(self.cluster, f"{run} of group {self._group.number} of {cluster}", self._job, self._dense)

    @contextmanager
    def _refusing_return(self, run: str, epoch: int) -> Iterator[None]:
        """Raise TaskLost, also in place of other errors, if the tables have returned to a snapshot since `epoch`."""
        try:
            yield
        except DflowError as error:
            # The accumulators of the run are gone then.
            if not isinstance(error, TaskLost):
                self._refuse_return(run, epoch, error)
            raise
        self._refuse_return(run, epoch)

    def _refuse_return(self, run: str, epoch: int, cause: DflowError | None = None) -> None:
        if self.cluster.steps.epoch != epoch:
            raise TaskLost(
                f"the tables of run {run!r} have returned to a snapshot, and the dense layers have not",
                "start the workers again, which restore both from a checkpoint",
            ) from cause
