"""Metrics that are no means: each function returns the state of a batch, a pytree of sums, for the results of a step.

`dflow.evaluate`, `dflow.Trainer`, strategies and loggers add the states of batches and workers up, and compute the
metric of the sums. The functions take arrays or tracers, any real dtype, and compute as float32.

Weights, also a mask, have the shape of the values or of their first axes, and count examples: one of weight 0 is as if
it were not there, even if its values are NaN. A value that cannot be used, such as a score that is NaN or a label
outside 0 to 1, makes the metric NaN. So is a metric that is not defined, of no examples or of one class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dflow.tracing.errors import TrainingError

__all__ = [
    "Sums",
    "auc",
    "average_precision",
    "calibration",
    "calibration_error",
    "hit_rate",
    "mean",
    "ndcg",
    "perplexity",
    "precision",
    "recall",
]


@jax.tree_util.register_pytree_node_class
class Sums:
    """The state of a metric that is a function of sums over the examples.

        dflow.metrics.Sums(lambda errors, count: (errors / count) ** 0.5, errors=jnp.sum(error**2), count=error.size)

    of    function of the sums by name, as NumPy arrays of float64; it returns a number, or numbers by name. A
          division by zero gives NaN, without a warning
    sums  arrays of a batch, of the same shapes for each batch
    """

    def __init__(self, of: Callable[..., Any], /, **sums: Any) -> None:
        self._of, self._sums = of, sums

    def merge(self, other: Sums) -> Sums:
        """Return the state of the examples of both."""
        return Sums(self._of, **{name: value + other._sums[name] for name, value in self._sums.items()})

    def compute(self) -> Any:
        """Return the metric; waits for the arrays."""
        with np.errstate(all="ignore"):
            return self._of(**{name: np.asarray(value, np.float64) for name, value in self._sums.items()})

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Return the arrays, and the names and the function, for JAX."""
        return tuple(self._sums.values()), (self._of, tuple(self._sums))

    @classmethod
    def tree_unflatten(cls, of: Any, sums: Sequence[Any]) -> Sums:
        """Return the state of these arrays, for JAX."""
        return cls(of[0], **dict(zip(of[1], sums, strict=True)))


def mean(values: Any, weights: Any = None) -> Sums:
    """Return the state of the weighted mean of `values`, such as losses of examples, or whether they are right."""
    values, weights = _weighted("mean", weights, values=values)
    return _mean(values, weights)


def perplexity(losses: Any, weights: Any = None) -> Sums:
    """Return the state of the perplexity, the exponential of the weighted mean of the tokens' cross-entropies."""
    losses, weights = _weighted("perplexity", weights, losses=losses)
    return Sums(_exponential, part=_sum(weights, losses), whole=weights.sum())


def auc(scores: Any, labels: Any, weights: Any = None, *, bits: int = 16) -> Sums:
    """Return the state of the area under the ROC curve: the probability that a positive has a larger score.

    scores  any real numbers, such as log odds: only their order counts. Near 1 probabilities have few digits, so give
            log odds rather than probabilities
    labels  1 or true for positives, 0 or false for negatives; between, an example counts as both in parts
    bits    number of leading bits of the float32 scores that are compared, 2 to 24. With 16, scores that differ by less
            than 1/256 of themselves may be equal, as in bfloat16. The state has 2 * 2**bits floats

    A pair of equal scores counts half, as in scikit-learn. So the error is at most half of the share of the pairs of a
    positive and a negative that are equal only in these bits, and far less if either may be the larger one. Scores of
    bfloat16 give the exact value.
    """
    return Sums(_area, **_by_score("auc", scores, labels, weights, bits))


def average_precision(scores: Any, labels: Any, weights: Any = None, *, bits: int = 16) -> Sums:
    """Return the state of the average precision, the area under the curve of precision over recall, in steps.

    The arguments are those of `auc`.
    """
    return Sums(_steps, **_by_score("average_precision", scores, labels, weights, bits))


def precision(scores: Any, labels: Any, weights: Any = None, *, threshold: float = 0.5) -> Sums:
    """Return the state of the precision: the share of positives among the examples with a score above `threshold`."""
    scores, labels, weights = _weighted("precision", weights, scores=scores, labels=labels)
    return _mean(_within(labels, 1), _product(weights, _above(scores, threshold)))


def recall(scores: Any, labels: Any, weights: Any = None, *, threshold: float = 0.5) -> Sums:
    """Return the state of the recall: the share of the positives that have a score above `threshold`."""
    scores, labels, weights = _weighted("recall", weights, scores=scores, labels=labels)
    return _mean(_above(scores, threshold), _product(weights, _within(labels, 1)))


def calibration(probabilities: Any, labels: Any, weights: Any = None) -> Sums:
    """Return the state of the calibration: the sum of the predicted probabilities over that of the labels."""
    predicted, labels, weights = _weighted("calibration", weights, probabilities=probabilities, labels=labels)
    return Sums(_ratio, part=_sum(weights, _within(predicted, 1)), whole=_sum(weights, _within(labels, 1)))


def calibration_error(probabilities: Any, labels: Any, weights: Any = None, *, bins: int = 15) -> Sums:
    """Return the state of the expected calibration error, with bins of equal width from 0 to 1.

    That is the mean over the examples of the distance between the mean probability and the mean label of their bin.
    """
    predicted, labels, weights = _weighted("calibration_error", weights, probabilities=probabilities, labels=labels)
    differences = _product(weights, _within(predicted, 1) - _within(labels, 1))
    bin = jnp.clip(jnp.nan_to_num(predicted) * bins, 0, bins - 1).astype(jnp.int32)
    return Sums(_distance, differences=jnp.zeros(bins).at[bin].add(differences), whole=weights.sum())


def hit_rate(scores: Any, relevance: Any, k: int, weights: Any = None) -> Sums:
    """Return the state of the hit rate: the share of rows with a relevant item among the `k` of the largest scores.

    scores     of the items, [..., items]; -inf for an item that is none
    relevance  of the items, of the same shape, above 0 for relevant ones. A row without one is no hit
    weights    of the rows, of the shape of their axes or the first of them

    Of equal scores, those of irrelevant items come first: a model that knows nothing gets no hits.
    """
    scores, relevance, weights = _rows("hit_rate", scores, relevance, k, weights)
    is_relevant = relevance > 0
    best = jnp.where(is_relevant, scores, -jnp.inf).max(-1, keepdims=True)
    before = (~is_relevant & (scores >= best)).sum(-1)
    is_hit = (before < k) & is_relevant.any(-1)
    return _mean(jnp.where(_is_usable(scores, relevance), is_hit, jnp.nan), weights)


def ndcg(scores: Any, relevance: Any, k: int | None = None, weights: Any = None) -> Sums:
    """Return the state of the normalised discounted cumulative gain, the mean over the rows, as in scikit-learn.

    The arguments are those of `hit_rate`, and None is for all items. The gain of an item is its relevance, the discount
    of position i from 1 on is 1 / log2(i + 1), and items of equal scores have their mean. A row without a relevant item
    counts 0.
    """
    scores, relevance, weights = _rows("ndcg", scores, relevance, k, weights)
    positions = np.arange(scores.shape[-1])
    discounts = np.where(positions < (k or np.inf), 1 / np.log2(positions + 2), 0).astype(np.float32)
    gained = jnp.vectorize(_gain, signature="(n),(n),(n)->()")(scores, relevance, discounts)
    best = -(jnp.sort(-relevance, axis=-1) * discounts).sum(-1)  # a product of matrices has fewer digits on a GPU
    return _mean(jnp.where(_is_usable(scores, relevance), jnp.where(best > 0, gained / best, 0), jnp.nan), weights)


def _gain(scores: Any, relevance: Any, discounts: Any) -> Any:
    """Return the discounted gain of a row; items of equal scores have the mean of their discounts."""
    order = jnp.argsort(-scores)
    ordered = scores[order]
    group = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]]))
    of_groups = jnp.zeros_like(discounts)
    means = of_groups.at[group].add(discounts) / of_groups.at[group].add(1)
    return (relevance[order] * means[group]).sum()


def _by_score(owner: str, scores: Any, labels: Any, weights: Any, bits: int) -> dict[str, Any]:
    """Return the weights of positives and of negatives by the first bits of their scores, in the order of these."""
    if not 2 <= bits <= 24:
        raise TrainingError(f"dflow.metrics.{owner}: bits: expected 2 to 24, got {bits}", "give 16")
    scores, labels, weights = _weighted(owner, weights, scores=scores, labels=labels)
    labels = jnp.where(jnp.isnan(scores), jnp.nan, _within(labels, 1))
    raw = lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), jnp.uint32)  # -0.0 is 0.0
    bin = jnp.where(raw >> 31, ~raw, raw | np.uint32(1 << 31)) >> (32 - bits)
    empty = jnp.zeros(2**bits)
    positives, negatives = _product(weights, labels), _product(weights, 1 - labels)
    return {"positives": empty.at[bin].add(positives), "negatives": empty.at[bin].add(negatives)}


def _weighted(owner: str, weights: Any, **given: Any) -> list[Any]:
    """Return the arrays of one shape, and the weights in that shape, as float32."""
    arrays = {name: _real(owner, name, value) for name, value in given.items()}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) > 1:
        raise TrainingError(
            f"dflow.metrics.{owner}: expected {' and '.join(arrays)} of one shape, got "
            f"{' and '.join(str(array.shape) for array in arrays.values())}",
            "reshape one, for instance by scores[:, 0] or labels[:, None]",
        )
    [shape] = shapes
    return [*arrays.values(), _broadcast(owner, weights, shape)]


def _rows(owner: str, scores: Any, relevance: Any, k: int | None, weights: Any) -> list[Any]:
    """Return the scores and relevance, and the weights of the rows, as float32."""
    if k is not None and k < 1:
        raise TrainingError(f"dflow.metrics.{owner}: k: expected at least 1, got {k}", "give 10")
    scores, relevance, _ = _weighted(owner, None, scores=scores, relevance=relevance)
    if not scores.ndim or not scores.shape[-1]:
        raise TrainingError(
            f"dflow.metrics.{owner}: expected scores of items, got the shape {scores.shape}", "give [batch, items]"
        )
    return [scores, relevance, _broadcast(owner, weights, scores.shape[:-1])]


def _broadcast(owner: str, weights: Any, shape: tuple[int, ...]) -> Any:
    if weights is None:
        return jnp.ones(shape)
    given = _real(owner, "weights", weights)
    if given.shape != shape[: given.ndim]:
        raise TrainingError(
            f"dflow.metrics.{owner}: weights: expected the shape {shape} or the first of its axes, got {given.shape}",
            "give a weight or a mask for each example",
        )
    return jnp.broadcast_to(given.reshape(given.shape + (1,) * (len(shape) - given.ndim)), shape)


def _real(owner: str, name: str, value: Any) -> Any:
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.bool_) and not jnp.issubdtype(array.dtype, jnp.number):
        raise TrainingError(f"dflow.metrics.{owner}: {name}: expected numbers, got {array.dtype}", "give an array")
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TrainingError(f"dflow.metrics.{owner}: {name}: expected real numbers, got {array.dtype}", "give abs(...)")
    return array.astype(jnp.float32)


def _within(values: Any, most: float) -> Any:
    """Return the values, with NaN in place of values below 0 or above `most`."""
    return jnp.where((values >= 0) & (values <= most), values, jnp.nan)


def _above(scores: Any, threshold: float) -> Any:
    return jnp.where(jnp.isnan(scores), jnp.nan, scores > threshold)


def _is_usable(scores: Any, relevance: Any) -> Any:
    return ~(jnp.isnan(scores) | jnp.isnan(_within(relevance, jnp.inf))).any(-1)


def _product(weights: Any, values: Any) -> Any:
    """Return the product, 0 where the weight is."""
    return jnp.where(weights == 0, 0, weights * values)


def _sum(weights: Any, values: Any) -> Any:
    return _product(weights, values).sum()


def _mean(values: Any, weights: Any) -> Sums:
    return Sums(_ratio, part=_sum(weights, values), whole=weights.sum())


def _ratio(part: Any, whole: Any) -> Any:
    return part / whole if whole else np.nan


def _exponential(part: Any, whole: Any) -> Any:
    return np.exp(part / whole)


def _distance(differences: Any, whole: Any) -> Any:
    return np.abs(differences).sum() / whole


def _area(positives: Any, negatives: Any) -> Any:
    below = np.cumsum(negatives) - negatives / 2
    return (positives * below).sum() / (positives.sum() * negatives.sum())


def _steps(positives: Any, negatives: Any) -> Any:
    found, others = positives[::-1], negatives[::-1]
    precisions = np.cumsum(found) / (np.cumsum(found) + np.cumsum(others))
    return np.where(found == 0, 0, found * precisions).sum() / found.sum()
