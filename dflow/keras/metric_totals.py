"""The states of a model's metrics, added up over the steps of all workers, one row for each epoch.

Keras's metrics add what a batch gives to their state: sums, counts, the counts of an AUC at its thresholds. So what
each step adds can be added up in any order, and a step that is done again after a death adds it once, like any other
change of a step. A row for each epoch means that nothing is ever set to zero, which a return to a snapshot could undo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from dflow.tracing.errors import TrainingError
from dflow.tracing.state.resources import Variable

#: Begin of the names of the vectors in the result of a step; the dtype follows.
VECTOR = "metrics/"
#: Name of `AddedStates` in the result of an evaluation.
ADDED = "added"
#: Least number of rows that are made together, so that a program that calls `fit` often makes few variables.
_ROWS = 64


class AddedStates(NamedTuple):
    """What a batch adds to the states of the metrics, by dtype, as the state of a metric for `dflow.evaluate`."""

    vectors: Mapping[str, Any]

    def merge(self, other: AddedStates) -> AddedStates:
        """Return the sum of both."""
        return AddedStates({dtype: vector + other.vectors[dtype] for dtype, vector in self.vectors.items()})

    def compute(self) -> Mapping[str, Any]:
        """Return the vectors."""
        return self.vectors


class MetricStates:
    """The variables of the metrics of a compiled Keras model as vectors, one of each dtype.

    model   a Keras model whose metrics are built
    start   values of `model.metrics_variables` before a batch
    """

    def __init__(self, model: Any, start: Sequence[Any]) -> None:
        self.model, self.start = model, start
        #: Returns the metrics of the sums of vectors by name, which may not be computed yet.
        self.logs = jax.jit(self._logs)
        self._positions: dict[str, list[int]] = {}
        for position, value in enumerate(start):
            self._positions.setdefault(str(value.dtype), []).append(position)

    @classmethod
    def of(cls, model: Any, x: Any, y: Any, outputs: Any, sample_weight: Any) -> MetricStates:
        """Return the states of a model, whose metrics are built for such a batch.

        Raises TrainingError for a state that is no sum: a second batch does not add what the first one has added.
        """
        model.compute_loss(x, y, outputs, sample_weight)
        model.compute_metrics(x, y, outputs, sample_weight)
        model.reset_metrics()
        states = cls(model, [variable.value for variable in model.metrics_variables])

        def once_more() -> list[Any]:
            loss = model.compute_loss(x, y, outputs, sample_weight)
            model._loss_tracker.update_state(loss, sample_weight=jax.tree_util.tree_leaves(x)[0].shape[0])
            model.compute_metrics(x, y, outputs, sample_weight)
            return [variable.value for variable in model.metrics_variables]

        states._refuse_other_states(once_more(), once_more())
        model.reset_metrics()
        return states

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of the vectors, by dtype."""
        return {dtype: sum(self.start[one].size for one in found) for dtype, found in self._positions.items()}

    def updated(self, metrics: Sequence[Any], loss: Any, x: Any, y: Any, outputs: Any, sample_weight: Any) -> list[Any]:
        """Return the states after a batch; `metrics` are those after the computation of its `loss`."""
        model = self.model
        with keras.StatelessScope(list(zip(model.metrics_variables, metrics, strict=True))) as scope:
            model._loss_tracker.update_state(loss, sample_weight=jax.tree_util.tree_leaves(x)[0].shape[0])
            model.compute_metrics(x, y, outputs, sample_weight)
        found = [scope.get_current_value(variable) for variable in model.metrics_variables]
        return [old if new is None else new for old, new in zip(metrics, found, strict=True)]

    def added(self, after: Sequence[Any], weight: Any = None) -> dict[str, Any]:
        """Return the vectors that a batch has added to the states; zeros if it has the weight 0, since it has no rows.

        after   the states after the batch, which began with those of `start`
        """
        added = [new - old for new, old in zip(after, self.start, strict=True)]
        if weight is not None:
            added = [jnp.where(weight > 0, one, jnp.zeros_like(one)) for one in added]
        return {
            dtype: jnp.concatenate([jnp.ravel(added[one]) for one in found]) for dtype, found in self._positions.items()
        }

    def results(self, vectors: Mapping[str, Any]) -> dict[str, float]:
        """Set the states of the model's metrics to the sums of vectors, and return the metrics by name."""
        for variable, value in zip(self.model.metrics_variables, self._values(vectors), strict=True):
            variable.assign(value)
        found = {name: np.asarray(value) for name, value in self.model.get_metrics_result().items()}
        if large := next((name for name, value in found.items() if value.size != 1), None):
            raise TrainingError(
                f"metric {large!r}: expected a number, got an array of shape {found[large].shape}",
                "give the metric an average, such as keras.metrics.F1Score(average='macro')",
            )
        return {name: float(value.item()) for name, value in found.items()}

    def _logs(self, vectors: Mapping[str, Any]) -> Any:
        with keras.StatelessScope(list(zip(self.model.metrics_variables, self._values(vectors), strict=True))):
            return self.model.get_metrics_result()

    def _values(self, vectors: Mapping[str, Any]) -> list[Any]:
        values: list[Any] = [*self.start]
        for dtype, found in self._positions.items():
            rest = jnp.asarray(vectors[dtype], dtype)
            for position in found:
                start = self.start[position]
                values[position], rest = start + rest[: start.size].reshape(start.shape), rest[start.size :]
        return values

    def sums(self, found: Mapping[str, float]) -> dict[str, Any]:
        """Return the sums of the vectors of `AddedStates` from their values in a result of `dflow.evaluate`."""
        return {
            dtype: np.asarray([found[f"{ADDED}/{dtype}/{at}"] for at in range(size)], dtype)
            for dtype, size in self.sizes.items()
        }

    def _refuse_other_states(self, once: Sequence[Any], twice: Sequence[Any]) -> None:
        """Raise TrainingError if a state is no sum over batches: `once` and `twice` have one batch once and twice."""
        for variable, start, one, two in zip(self.model.metrics_variables, self.start, once, twice, strict=True):
            if not np.allclose(two - one, one - start, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise TrainingError(
                    f"metric variable {variable.path!r}: expected a sum over batches, got a state that a second "
                    "batch changes otherwise, which has no sum over workers",
                    "use a metric of sums and counts, such as keras.metrics.Mean of each batch's value, or leave it "
                    "out of compile",
                )


class MetricTotals:
    """Variables with a row of `states` for each epoch; made in the present scope.

    name  prefix of their names
    """

    def __init__(self, states: MetricStates, rows: int, name: str) -> None:
        self.states, self.rows, self._used = states, max(rows, _ROWS), 0
        self._variables = {
            dtype: Variable(jnp.zeros((self.rows, size), dtype), name=f"{name}/{dtype}", trainable=False)
            for dtype, size in states.sizes.items()
        }

    def reserve(self, rows: int) -> int | None:
        """Return the first of `rows` rows that no training has used; None if there are too few."""
        first, end = self._used, self._used + rows
        if end > self.rows:
            return None
        self._used = end
        return first

    def add(self, row: Any, added: Mapping[str, Any]) -> None:
        """Add what a batch gives to the states of an epoch, in a step."""
        for dtype, vector in added.items():
            self._variables[dtype].scatter_add(row, vector)

    def read(self, row: int) -> dict[str, Any]:
        """Return the sums of an epoch."""
        return {dtype: variable.gather(jnp.int32(row)) for dtype, variable in self._variables.items()}
