"""Softmax over a large vocabulary, whose weights are in shards on several tasks.

The full softmax is computed where the weights are (section 6.4 of the OSDI 2016 paper): each task multiplies by its own
classes, and sends the largest logit, the sum of exponentials and the label's logit of each example. The logits and the
gradient of the weights never leave their task. The sampled softmax looks up the rows of the labels and of a few
classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from dflow.scopes import colocate_with
from dflow.tables.sharded_variable import ShardedVariable
from dflow.tracing.errors import InputError, VariableShapeError
from dflow.tracing.ir.wide_sums import sum_dtype
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.primitives.id_checks import nan_unless


@suggests_keywords
def softmax_cross_entropy(
    weights: ShardedVariable, hidden: Any, labels: Any, *, bias: ShardedVariable | None = None
) -> jax.Array:
    """The cross entropy of each example, an array of the shape of `labels`.

    weights  [classes, d], by `rows` or `modulo`
    hidden   [..., d]
    labels   i32[...], the class of each example
    bias     [classes], made with `near=weights`
    raises   InputError, while the step runs, for a label that is no class, which it names; VariableShapeError for
             shapes that do not fit
    """
    hidden, labels = _checked(weights, hidden, labels, bias)
    positions = weights.layout.positions(labels)
    bounds = weights.layout.bounds
    dtype = jnp.result_type(hidden, weights.dtype)
    wide = sum_dtype(dtype)
    largest, sums, label_logit = [], [], jnp.zeros(labels.shape, wide)
    for number, shard in enumerate(weights.shards):
        with colocate_with(shard):
            logits = jnp.matmul(hidden, shard.read().T, preferred_element_type=wide)
            if bias is not None:
                logits = logits + bias.shards[number].read()
            peak = jax.lax.stop_gradient(logits.max(-1))
            largest.append(peak)
            sums.append(jnp.exp(logits - peak[..., None]).sum(-1))
            here = positions - bounds[number]
            is_here = (here >= 0) & (here < shard.shape[0])
            found = jnp.take_along_axis(logits, jnp.where(is_here, here, 0)[..., None], -1)[..., 0]
            found = jnp.where(is_here, found, 0)
        label_logit = label_logit + found
    peak = jnp.stack(largest).max(0)
    total = sum(part * jnp.exp(own - peak) for part, own in zip(sums, largest, strict=True))
    is_class = (labels >= 0) & (labels < weights.shape[0])  # an exported function has no check of labels
    return nan_unless(is_class, jnp.log(total) + peak - label_logit).astype(dtype)


@suggests_keywords
def sampled_softmax_cross_entropy(
    weights: ShardedVariable,
    hidden: Any,
    labels: Any,
    *,
    samples: int,
    key: Any,
    bias: ShardedVariable | None = None,
) -> jax.Array:
    """An estimate of `softmax_cross_entropy` from a few classes, for training alone: an array of the shape of `labels`.

    samples  number of classes drawn for the whole batch, with replacement, from a log-uniform distribution: class k
             with a probability in proportion to log((k + 2) / (k + 1)). Number the classes by decreasing frequency
    key      a key of `jax.random`, another one in each step
    weights, hidden, labels, bias, raises  as for `softmax_cross_entropy`

    The sum of exponentials over all classes but the label is estimated by importance sampling, and its expectation is
    that sum (Bengio and Senecal, 2008). Only the rows of the labels and of the samples are looked up and updated.
    """
    hidden, labels = _checked(weights, hidden, labels, bias)
    if samples < 1:
        raise InputError(f"samples: expected 1 or more, got {samples}", "give for instance 512")
    classes = weights.shape[0]
    drawn = jnp.exp(jax.random.uniform(key, (samples,)) * jnp.log1p(float(classes))) - 1
    drawn = jnp.clip(drawn.astype(jnp.int32), 0, classes - 1)
    probability = jnp.log1p(1 / (drawn + 1.0)) / jnp.log1p(float(classes))
    ids = jnp.concatenate([labels.reshape(-1), drawn])
    dtype = jnp.result_type(hidden, weights.dtype)
    hidden, rows = hidden.astype(sum_dtype(dtype)), weights.rows(ids).astype(sum_dtype(dtype))
    of_labels, of_drawn = rows[: labels.size].reshape(hidden.shape), rows[labels.size :]
    own, others = (hidden * of_labels).sum(-1), hidden @ of_drawn.T
    if bias is not None:
        biases = bias.rows(ids)
        own, others = own + biases[: labels.size].reshape(labels.shape), others + biases[labels.size :]
    others = others - jnp.log(samples * probability)
    others = jnp.where(drawn == labels[..., None], -jnp.inf, others)
    loss: jax.Array = jax.nn.logsumexp(jnp.concatenate([own[..., None], others], -1), -1) - own
    return loss.astype(dtype)


def _checked(weights: ShardedVariable, hidden: Any, labels: Any, bias: ShardedVariable | None) -> tuple[Any, Any]:
    hidden = jnp.asarray(hidden)
    if weights.ndim != 2 or weights.layout.axis != 0 or hidden.shape != (*jnp.shape(labels), weights.shape[1]):
        raise VariableShapeError(
            f"a softmax over {weights.name!r}: expected weights of (classes, d) divided by rows, labels and, of their "
            f"shape and d, hidden values, got {weights.shape} by {weights.layout.by}, {jnp.shape(labels)} and "
            f"{hidden.shape}",
            "give a hidden vector and a label for each example",
        )
    if bias is not None and bias.layout != replace(weights.layout, shape=weights.shape[:1]):
        raise VariableShapeError(
            f"the bias of a softmax over {weights.name!r}: expected {weights.shape[:1]} divided as the weights, got "
            f"{bias.shape} in {bias.layout.shards} shards by {bias.layout.by}",
            "make it with near=weights",
        )
    return hidden, weights.checked(labels)
