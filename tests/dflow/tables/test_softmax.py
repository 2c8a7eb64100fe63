"""Softmax on shards equals the dense one with its gradients; the sampled one approaches it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.testing import memory_cluster

pytestmark = pytest.mark.once

CLASSES, DIM, EXAMPLES = 37, 5, 6
HIDDEN = jax.random.normal(jax.random.key(1), (2, 3, DIM))
#: With the first and the last classes of the shards, which begin at 0, 2 and 10.
LABELS = jnp.array([[0, 36, 2], [10, 1, 9]])


def tables() -> tuple[dflow.ShardedVariable, dflow.ShardedVariable]:
    """Weights in shards of several sizes, and a bias for them."""
    weights = dflow.ShardedVariable(
        lambda: jax.random.normal(jax.random.key(2), (CLASSES, DIM)),
        shards=3,
        name="weights",
        traffic=1 / np.arange(1, CLASSES + 1),
    )
    bias = dflow.ShardedVariable(lambda: jax.random.normal(jax.random.key(3), (CLASSES,)), near=weights, name="bias")
    return weights, bias


def dense(weights: Any, bias: Any, hidden: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ weights.T + bias, LABELS)


def test_the_full_softmax_is_the_dense_one() -> None:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            weights, bias = tables()
        assert [shard.device for shard in bias.shards] == [shard.device for shard in weights.shards]

        @dflow.jit
        def both(hidden: Any) -> Any:
            def loss(hidden: Any) -> Any:
                return dflow.softmax_cross_entropy(weights, hidden, LABELS, bias=bias).sum()

            return dflow.value_and_grad(loss, [weights, bias], argnums=0)(hidden)

        value, ((by_weights, by_bias), by_hidden) = both(HIDDEN * 30)
        expected, gradients = jax.value_and_grad(lambda *given: dense(*given).sum(), argnums=(0, 1, 2))(
            weights.read(), bias.read(), HIDDEN * 30
        )
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for found, wanted in zip((by_weights.read(), by_bias.read(), by_hidden), gradients, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_no_logits_and_no_array_of_the_size_of_the_weights_travels() -> None:
    classes = 4000
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            weights = dflow.ShardedVariable(lambda: jnp.ones((classes, DIM)), name="many")
            # The norm of the gradients has squares of zeros for the imaginary parts.
            clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
            optimizer = dflow.Optimizer(clipped, [weights], name="opt")

        @dflow.jit
        def step(hidden: Any) -> Any:
            def loss() -> Any:
                return dflow.softmax_cross_entropy(weights, hidden, LABELS).mean()

            value, gradients = dflow.value_and_grad(loss, [weights])()
            optimizer.apply(gradients)
            return value

        np.testing.assert_allclose(step(HIDDEN), np.log(classes), rtol=1e-5)
        # Of each example three numbers and the gradient of the hidden values, and a norm, aligned, from each task.
        assert sum(worker.server.channel.taken_in().values()) <= 2 * (4 * 64 + 4 * EXAMPLES * DIM + 64)
        # To each task the hidden values, four numbers of each example, and the norm with whether it is too large.
        sent = sum(edge.size_bytes for edge in worker.server.channel.traffic())
        assert sent <= 2 * (4 * EXAMPLES * DIM + 64 + 4 * 64 + 2 * 64)


def test_the_sampled_softmax_approaches_the_full_one() -> None:
    weights, bias = tables()

    def loss(samples: int, key: Any) -> Any:
        return dflow.sampled_softmax_cross_entropy(weights, HIDDEN, LABELS, samples=samples, key=key, bias=bias)

    found, gradients = dflow.jit(dflow.value_and_grad(lambda: loss(200_000, jax.random.key(0)).sum(), [weights]))()
    expected = dense(weights.read(), bias.read(), HIDDEN)
    np.testing.assert_allclose(found, expected.sum(), rtol=5e-3)
    by_weights = jax.grad(lambda w: dense(w, bias.read(), HIDDEN).sum())(weights.read())
    np.testing.assert_allclose(gradients[0].read(), by_weights, atol=0.02)
    # With few samples the estimated sum of exponentials is right on average.
    run = dflow.jit(lambda key: loss(4, key))
    ratios = [jnp.exp(run(jax.random.key(n)) - expected) for n in range(400)]
    np.testing.assert_allclose(np.mean(ratios), 1, atol=0.15)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            lambda w, b: dflow.softmax_cross_entropy(w, HIDDEN, LABELS + 9),
            dflow.InputError,
            r"0 to 36, got 45 at \(0, 1\)",
        ),
        (
            lambda w, b: dflow.softmax_cross_entropy(w, HIDDEN[0], LABELS),
            dflow.VariableShapeError,
            "expected weights of",
        ),
        (lambda w, b: dflow.softmax_cross_entropy(w, HIDDEN, LABELS, bias=w), dflow.VariableShapeError, "near=weights"),
        (
            lambda w, b: dflow.sampled_softmax_cross_entropy(w, HIDDEN, LABELS, samples=0, key=jax.random.key(0)),
            dflow.InputError,
            "samples: expected 1 or more, got 0",
        ),
    ],
)
def test_wrong_labels_shapes_and_samples_are_refused(use: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use(*tables())
