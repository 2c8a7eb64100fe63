"""Metrics of Keras as states that add up over batches and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras

from dflow.metrics import Sums
from dflow.tracing.errors import TrainingError


def metric_state(metric: keras.metrics.Metric, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Sums:
    """Return the state of a Keras metric, such as `keras.metrics.AUC()`, of a batch, for the results of a step.

    The sums are the metric's variables, which Keras adds up too; those of the object itself are reset.

    Raises TrainingError for a metric with variables that do not add up.
    """
    given = {} if sample_weight is None else {"sample_weight": sample_weight}
    with jax.ensure_compile_time_eval():  # some metrics make their variables at the first batch
        metric.update_state(*(jnp.zeros(jnp.shape(array), jnp.result_type(array)) for array in (y_true, y_pred)))
        metric.reset_state()
        start = [variable.value for variable in metric.variables]
    if others := [variable.path for variable in metric.variables if variable.aggregation != "sum"]:
        raise TrainingError(
            f"metric {metric.name!r}: expected variables that add up, got {others[0]!r}, which does not",
            "return a state of sums, such as dflow.metrics.Sums",
        )
    found = metric.stateless_update_state(start, y_true, y_pred, **given)
    return Sums(_MetricResult(metric), **{f"sum{index}": value for index, value in enumerate(found)})


@dataclass(frozen=True)
class _MetricResult:
    """The function of a metric's variables; equal for one metric."""

    metric: keras.metrics.Metric

    def __call__(self, **sums: Any) -> Any:
        """Return the result of these values of the variables."""
        types = [variable.dtype for variable in self.metric.variables]
        return self.metric.stateless_result([*map(jnp.asarray, sums.values(), types)])
