"""An evaluation that several tasks share: they claim its batches, and use values of one moment of all tasks.

One task captures the values on the tasks that hold them, and shares the capture under the name of the evaluation. Each
task reads the values once. The ledger of steps says which task captures, hands out the batches, and adds up what they
gave.

Invariants:
- each batch is in the sums once: a batch whose task died is claimed again, and the dead task's is in no sum;
- all sums are of one capture, since each capture has a separate run in the ledger. A capture is kept as long as a
  task that uses it lives. If all of them die, the evaluation begins again with another capture;
- the evaluation has one result, the first that is recorded. Then the sums, which may be large, are no longer kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import jax
from msgspec.structs import replace

from dflow.distributed.asynchronous.worker_claims import claimed
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.cluster.shared_values import SharedValues
from dflow.distributed.training.work_messages import Claimed, ClaimSteps
from dflow.tracing.errors import DflowError, TrainingError
from dflow.tracing.source import caller
from dflow.tracing.state.resources import Variable

#: Evaluates the batches of some numbers with values of variables; returns sums by name.
Sums = Callable[[range, Sequence[jax.Array]], Mapping[str, float]]
#: Returns the result of the evaluation, of the sums over all batches.
Result = Callable[[Mapping[str, float]], Mapping[str, float]]


class Evaluations:
    """The evaluations of a cluster that this task takes part in."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._names = cluster, set[str]()

    def begin(self, name: str, count: int) -> SharedEvaluation | None:
        """Return this task's part in an evaluation of `count` batches; None in a standalone process.

        Raises TrainingError for the name of an earlier evaluation of this process.
        """
        if name in self._names:
            raise TrainingError(
                f"evaluation {name!r}: expected a new name for each evaluation, got one for the second time",
                "put the number of the step into it",
                at=caller(),
            )
        self._names.add(name)
        return None if self._cluster.is_standalone else SharedEvaluation(self._cluster, name, count)


class SharedEvaluation:
    """This task's part in the evaluation `name` of `count` batches."""

    def __init__(self, cluster: Cluster, name: str, count: int) -> None:
        self._cluster, self._name, self._count = cluster, name, count
        self._result = self._claim(f"result of evaluation {name}", 1)

    def run(self, variables: Sequence[Variable], sums: Sums, result: Result) -> dict[str, float]:
        """Evaluate batches until all tasks together have done all; return the result.

        If a task that holds variables is lost, the evaluation starts again after the return to a snapshot.

        sums    function of a range of batch numbers and the captured values of `variables`; it evaluates these batches
                and returns their sums by name
        result  function of the sums over all batches
        """
        return self._cluster.steps.retried(lambda: self._run(variables, sums, result))

    def _run(self, variables: Sequence[Variable], sums: Sums, result: Result) -> dict[str, float]:
        shared = SharedValues(self._cluster.requests, self._cluster.steps, variables, self._name)
        try:
            found = self._captured(shared)
            return found if isinstance(found, dict) else self._summed(*found, sums, result)
        finally:
            shared.end()

    def _captured(self, shared: SharedValues) -> tuple[str, list[jax.Array]] | dict[str, float]:
        """Return the name of the shared capture and its values, or the result if the evaluation is complete.

        Each attempt at a capture is a run of one step: the task that claims it captures the values, the others wait. If
        all tasks that used the capture are lost or failed before there is a result, the next attempt makes another one.
        """
        for attempt in itertools.count():
            if result := self._ask(replace(self._result, more=False)).sums:
                return dict(result)
            claim = self._claim(f"capture {attempt} of evaluation {self._name}", 1)
            if self._ask(claim).count:
                with self._returned(claim):
                    shared.capture()
                self._ask(replace(claim, done=1))
            if found := shared.read():
                return found
        raise AssertionError

    def _summed(self, capture: str, values: Sequence[jax.Array], sums: Sums, result: Result) -> dict[str, float]:
        """Evaluate batches until all are done; return the result that was recorded first."""
        claim = self._claim(f"evaluation {self._name} of capture {capture}", self._count)
        given = self._ask(claim)
        while given.count:
            with self._returned(claim):
                found = sums(given.steps, values)
            given = self._ask(replace(claim, done=given.count, sums=dict(found)))
        recorded = self._ask(self._result)
        if recorded.count:
            with self._returned(self._result):
                found = result(given.sums)
            recorded = self._ask(replace(self._result, done=1, sums=dict(found)))
        self._ask(replace(claim, more=False, drops_sums=True))
        return dict(recorded.sums)

    @contextmanager
    def _returned(self, claim: ClaimSteps) -> Iterator[None]:
        """Return a context that, if its block raises, returns the claimed steps to the other tasks."""
        try:
            yield
        except BaseException:
            with suppress(DflowError):
                self._ask(replace(claim, more=False))
            raise

    def _claim(self, run: str, count: int) -> ClaimSteps:
        return ClaimSteps(run, self._cluster.task, count, is_training=False)

    def _ask(self, claim: ClaimSteps) -> Claimed:
        return claimed(self._cluster.coordinator, claim)
