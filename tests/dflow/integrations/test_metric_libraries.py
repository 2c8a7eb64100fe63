"""Metrics of clu, metrax and Keras in a shared `dflow.evaluate`: those of all examples in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.training.step_report import real_metrics
from dflow.testing import memory_cluster

pytestmark = pytest.mark.once

DRAWN = np.random.default_rng(0)
LABELS = DRAWN.integers(3, size=50).astype(np.int32)
LOGITS = (DRAWN.normal(size=(50, 3)) + 2 * np.eye(3)[LABELS]).astype(np.float32)
WEIGHTS = DRAWN.random(50).astype(np.float32)
Evaluated = Callable[[Callable[..., Any]], dict[str, float]]


@pytest.fixture(scope="module")
def evaluated() -> Iterator[Evaluated]:
    """Return a function that evaluates a step of logits, labels and weights, in batches of 16 that workers claim."""
    with memory_cluster(ps=1, workers=1) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            one = dflow.Variable(1.0, name="one")
        batches, names = dflow.data.batches((LOGITS, LABELS, WEIGHTS), 16), map(str, range(100))

        def evaluate(step: Callable[..., Any]) -> dict[str, float]:
            found = dflow.evaluate(lambda x, *rest: step(x * one, *rest), batches, cluster=worker, name=next(names))
            assert found.pop("examples") == 50
            return found

        yield evaluate


def test_metrics_of_clu_and_metrax(evaluated: Evaluated) -> None:
    clu, metrax = pytest.importorskip("clu.metrics"), pytest.importorskip("metrax")
    made = clu.Collection.create(accuracy=clu.Accuracy, loss=clu.Average.from_output("loss"))

    def collection(logits: Any, labels: Any, weights: Any) -> Any:
        return made.single_from_model_output(logits=logits, labels=labels, loss=weights)

    def several(logits: Any, labels: Any, weights: Any) -> dict[str, Any]:
        odds, is_one, ranked = jax.nn.sigmoid(logits[:, 1]), labels == 1, jax.nn.one_hot(labels, 3)
        return {
            "auc": metrax.AUCROC.from_model_output(odds, is_one, weights),
            "auc_pr": metrax.AUCPR.from_model_output(odds, is_one, weights),
            "precision": metrax.Precision.from_model_output(odds, is_one),
            "rmse": metrax.RMSE.from_model_output(logits, ranked),
            "ndcg": metrax.NDCGAtK.from_model_output(logits, ranked, jnp.array([1, 2])),
        }

    for step in (several, collection):
        assert evaluated(step) == pytest.approx(real_metrics(step(LOGITS, LABELS, WEIGHTS)), rel=1e-5)
    last = clu.LastValue.from_model_output
    with pytest.raises(dflow.TrainingError, match="last: expected a merge that adds each array"):
        evaluated(lambda logits, labels, weights: {"last": last(weights)})


def test_metrics_of_keras(evaluated: Evaluated) -> None:
    keras = pytest.importorskip("keras")
    import dflow.keras

    metrics = keras.metrics
    binary = metrics.AUC(), metrics.AUC(curve="PR"), metrics.PrecisionAtRecall(0.5), metrics.BinaryCrossentropy()
    of_classes = metrics.CategoricalAccuracy(), metrics.F1Score(), metrics.TopKCategoricalAccuracy(2), metrics.R2Score()

    def step(logits: Any, labels: Any, weights: Any) -> dict[str, Any]:
        odds, is_one, ranked = jax.nn.sigmoid(logits[:, 1:2]), labels[:, None] == 1, jax.nn.one_hot(labels, 3)
        soft = jax.nn.softmax(logits)
        return {metric.name: dflow.keras.metric_state(metric, is_one, odds, weights) for metric in binary} | {
            metric.name: dflow.keras.metric_state(metric, ranked, soft) for metric in of_classes
        }

    found, soft = evaluated(step), np.asarray(jax.nn.softmax(LOGITS))
    for metric in (*binary, *of_classes):
        if metric in binary:
            metric.update_state(LABELS[:, None] == 1, np.asarray(jax.nn.sigmoid(LOGITS[:, 1:2])), WEIGHTS)
        else:
            metric.update_state(np.eye(3, dtype=np.float32)[LABELS], soft)
        values = [value for name, value in found.items() if name.partition("/")[0] == metric.name]
        np.testing.assert_allclose(np.ravel(metric.result()), values, rtol=1e-5)
