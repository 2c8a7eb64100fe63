"""`dflow.metrics`, and states of other libraries' metrics: the metric of all examples, in evaluations and training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

import dflow
from dflow import metrics
from dflow.distributed import Async
from dflow.distributed.training.step_report import real_metrics
from tests.dflow.trainer.test_evaluation import Average, Largest
from tests.effort import examples

K = 3


def states(batch: Any) -> dict[str, Any]:
    """Return the metrics of rows of items, with weights of the rows."""
    scores, labels, weights = batch["scores"], batch["labels"], batch["weights"]
    odds = jax.nn.sigmoid(scores)
    return {
        "auc": metrics.auc(scores, labels, weights),
        "ap": metrics.average_precision(scores, labels, weights),
        "precision": metrics.precision(scores, labels, weights, threshold=0.25),
        "recall": metrics.recall(scores, labels, weights, threshold=0.25),
        "calibration": metrics.calibration(odds, labels, weights),
        "calibration_error": metrics.calibration_error(odds, labels, weights, bins=5),
        "hit_rate": metrics.hit_rate(scores, labels, K, weights),
        "ndcg": metrics.ndcg(scores, labels, K, weights),
        "ndcg_all": metrics.ndcg(scores, labels, weights=weights),
        "perplexity": metrics.perplexity(scores, weights),
        "mean": metrics.mean(scores > 0, weights),
    }


def reference(scores: Any, labels: Any, weights: Any) -> dict[str, float]:
    """Return the metrics of `states` of all rows, by scikit-learn and NumPy."""
    flat, truth, weight = scores.ravel(), labels.ravel(), np.repeat(weights, scores.shape[1])
    odds = 1 / (1 + np.exp(-flat.astype(np.float64)))
    bins = (odds * 5).astype(int)
    ranked = np.take_along_axis(labels, np.lexsort((labels, -scores)), axis=1)  # irrelevant ones first
    return {
        "auc": sklearn.roc_auc_score(truth, flat, sample_weight=weight),
        "ap": sklearn.average_precision_score(truth, flat, sample_weight=weight),
        "precision": sklearn.precision_score(truth, flat > 0.25, sample_weight=weight, zero_division=math.nan),
        "recall": sklearn.recall_score(truth, flat > 0.25, sample_weight=weight),
        "calibration": (weight * odds).sum() / (weight * truth).sum(),
        "calibration_error": np.abs(np.bincount(bins, weight * (odds - truth))).sum() / weight.sum(),
        "hit_rate": np.average(ranked[:, :K].any(1), weights=weights),
        "ndcg": sklearn.ndcg_score(labels, scores, k=K, sample_weight=weights),
        "ndcg_all": sklearn.ndcg_score(labels, scores, sample_weight=weights),
        "perplexity": math.exp(np.average(flat, weights=weight)),
        "mean": np.average(flat > 0, weights=weight),
    }


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 13))
def test_metrics_of_weighted_batches_are_those_of_all_examples(seed: int, count: int) -> None:
    drawn = np.random.default_rng(seed)
    scores = (drawn.integers(-12, 12, size=(count, 7)) / 4).astype(np.float32)  # with ties, and -0.0
    labels, weights = drawn.random((count, 7)) < 0.3, drawn.choice([0, 0.5, 1, 2], size=count).astype(np.float32)
    labels[0, :2], weights[0] = [True, False], 1
    used = weights > 0
    expected = reference(scores[used], labels[used], weights[used])
    scores[~used] = np.nan
    scores[scores == 0] *= drawn.choice([-1, 1])
    rows = {"scores": scores, "labels": labels, "weights": weights}
    found = dflow.evaluate(states, dflow.data.batches(rows, 4))
    assert found.pop("examples") == count
    assert found == pytest.approx(expected, rel=2e-5, nan_ok=True)


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(4, 16))
def test_the_error_of_the_auc_is_at_most_half_of_the_pairs_taken_for_equal(seed: int, bits: int) -> None:
    drawn = np.random.default_rng(seed)
    labels = drawn.random(500) < 0.3
    scores = (drawn.normal(size=500) + labels).astype(np.float32)
    parts = scores.view(np.int32) >> (32 - bits)
    equal = (parts[labels][:, None] == parts[~labels]) & (scores[labels][:, None] != scores[~labels])
    error = metrics.auc(scores, labels, bits=bits).compute() - sklearn.roc_auc_score(labels, scores)
    assert abs(error) <= equal.mean() / 2 + 1e-12
    assert bits < 16 or abs(error) < 1e-3


@jax.jit
def odd_states() -> dict[str, list[Any]]:
    one, zero, no = jnp.ones(2), jnp.zeros(2), jnp.array([0.5, jnp.nan])
    auc_of_parts = metrics.auc(jnp.array([1.0, 0.0, 0.0]), jnp.array([0.75, 0.25, 1.0]))
    return {
        "nan": [
            metrics.auc(one, one),
            metrics.auc(one, zero),
            metrics.auc(no, jnp.array([1, 0])),
            metrics.auc(one, jnp.array([1, -1])),
            metrics.average_precision(one, zero),
            metrics.precision(zero, one),
            metrics.recall(one, zero),
            metrics.calibration(one, zero),
            metrics.calibration(one * 2, one),
            metrics.calibration_error(no, one),
            metrics.hit_rate(no[None], one[None], 1),
            metrics.ndcg(one[None], -one[None]),
            metrics.perplexity(no),
            metrics.mean(one, zero),
            metrics.mean(jnp.zeros(0)),
        ],
        # The last is a model that knows nothing.
        "numbers": [metrics.mean(no, jnp.array([1, 0])), auc_of_parts, metrics.hit_rate(zero, jnp.eye(1, 2)[0], 1)],
    }


def test_a_metric_of_nothing_or_of_an_unusable_value_is_nan() -> None:
    found = odd_states()
    assert all(math.isnan(state.compute()) for state in found["nan"])
    assert [state.compute() for state in found["numbers"]] == [0.5, 0.5625, 0.0]


def test_shapes_that_would_be_broadcast_and_other_arguments_are_refused() -> None:
    x = jnp.ones((4, 1))
    with pytest.raises(
        dflow.TrainingError, match=r"(?s)auc: expected scores and labels of one shape, got \(4, 1\) and "
    ):
        metrics.auc(x, x[:, 0])
    with pytest.raises(
        dflow.TrainingError, match=r"weights: expected the shape \(4, 1\) or the first of its axes, got"
    ):
        metrics.precision(x, x, jnp.ones(3))
    with pytest.raises(dflow.TrainingError, match="auc: bits: expected 2 to 24, got 25"):
        metrics.auc(x, x, bits=25)
    with pytest.raises(dflow.TrainingError, match="ndcg: k: expected at least 1, got 0"):
        metrics.ndcg(x, x, 0)
    with pytest.raises(dflow.TrainingError, match=r"hit_rate: expected scores of items, got the shape \(\)"):
        metrics.hit_rate(1.0, 1.0, 1)
    with pytest.raises(dflow.TrainingError, match="mean: values: expected real numbers, got complex64"):
        metrics.mean(x + 1j)
    with pytest.raises(dflow.TrainingError, match="mean: values: expected numbers, got key"):
        metrics.mean(jax.random.key(0))


X = np.arange(25, dtype=np.float32)


def test_metrics_of_other_libraries_are_merged_and_computed() -> None:
    def step(x: Any) -> Any:
        return {"average": Average(x.sum(), x.size), "largest": Largest(x.max())}

    named = {"average/mean": 12, "average/scaled/0": 0, "average/scaled/1": 12}
    assert dflow.evaluate(step, dflow.data.batches(X, 10)) == {**named, "largest": 24, "examples": 25}
    alone = dflow.evaluate(lambda x: Largest(x.max()), [X])
    assert alone == {"loss": 24, "examples": 25}
    with pytest.raises(
        dflow.TrainingError, match=r"m: expected a float scalar.* or the state of a metric, got Largest"
    ):
        dflow.evaluate(lambda x: {"m": Largest(x + 1j)}, [X])
    with pytest.raises(dflow.TrainingError, match="expected a name for each result, got 'm/mean' twice"):
        dflow.evaluate(lambda x: {"m": Average(x.sum(), x.size), "m/mean": x}, [X])


def test_counts_beyond_the_integers_of_jax_do_not_wrap_around() -> None:
    large = Average(np.float32(3e9), np.int32(2**30), np.int32(1))
    merged = {"m": Average(np.float64(6e9), np.int64(2**32), np.int64(1))}
    assert real_metrics({"m": large})["m/mean"] == pytest.approx(3e9 / 2**30)
    assert real_metrics(merged)["m/mean"] == pytest.approx(6e9 / 2**32)


class Seen(dflow.Callback):
    def __init__(self) -> None:
        self.training: list[float] = []
        self.evaluations: list[float] = []

    def on_metrics(self, steps: int, metrics: Any) -> None:
        self.training.append(metrics["auc"])

    def on_evaluation(self, steps: int, metrics: Any) -> None:
        self.evaluations.append(metrics["auc"])


def test_a_trainer_stops_keeps_and_logs_by_such_a_metric(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    labels = drawn.random(200) < 0.5
    x = (drawn.normal(size=(200, 2)) + labels[:, None] * np.array([1, -1])).astype(np.float32)
    w = dflow.Variable(lambda: jnp.array([-1.0, -1.0]), name="w")

    @dflow.jit
    def step(x: Any, labels: Any) -> Any:
        w.assign_add(jnp.array([0.25, 0.0]))  # the best is [1, -1], after 8 steps
        return {"loss": jnp.mean(x), "auc": metrics.auc(x @ w, labels)}

    def measure(x: Any, labels: Any) -> Any:
        return {"auc": metrics.auc(x @ w, labels)}

    seen, batches = Seen(), dflow.data.batches((x, labels), 30)
    with dflow.CheckpointManager(tmp_path / "run", {"w": w}, every=2, best=("auc", 1)) as manager:
        trainer = dflow.Trainer(
            step,
            Async(dflow.connect()),
            evaluation=(measure, batches),
            evaluate_every=2,
            checkpoints=manager,
            callbacks=[seen, dflow.EarlyStopping("auc", patience=2), dflow.loggers.CSV(tmp_path / "curve.csv")],
        )
        result = trainer.run(dflow.data.batches((x, labels), 30, epochs=None), steps=60)
        best = int(np.argmax(seen.evaluations))
        assert manager.best is not None
        assert manager.best.step == 2 * best + 1
    assert result.steps == 2 * (best + 3) < 60
    expected = [
        sklearn.roc_auc_score(labels, x @ np.array([-1 + 0.5 * number, -1]))
        for number in range(1, len(seen.evaluations) + 1)
    ]
    assert seen.evaluations == pytest.approx(expected, abs=1e-3)
    assert all(0 <= one <= 1 for one in seen.training)
    header = (tmp_path / "curve.csv").read_text().splitlines()[0]
    assert header == "step,time,loss,auc,evaluation/auc"
    stops = [dflow.EarlyStopping("auk", mode="max")]
    without_numbers = dflow.data.numpy_batches(dict(enumerate(batches)).values())
    for data in (batches, without_numbers):
        other = dflow.Trainer(
            step, Async(dflow.connect()), evaluation=(measure, data), evaluate_every=2, callbacks=stops
        )
        with pytest.raises(dflow.TrainingError, match="expected 'auk' among the metrics of the evaluation"):
            other.run(batches, steps=1)
