"""A classifier in Flax NNX with batch norm and dropout, trained by plain JAX on concentric rings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.ports.norms import norms

CLASSES, FEATURES, HIDDEN, BATCH, STEPS = 3, 4, 24, 48, 50


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.last = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x, rngs):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x))), rngs=rngs))


def loss_of(model, x, labels, key):
    """Return the cross entropy, and the fraction of correct labels; the model then has the batch's statistics."""
    logits = model(x, nnx.Rngs(dropout=key))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (jnp.argmax(logits, axis=1) == labels).mean()


def transformation():
    return optax.sgd(0.1, momentum=0.9, nesterov=True)


def batches():
    """Points whose distance from the centre determines their class."""
    drawn = np.random.default_rng(0)
    for _ in range(STEPS):
        labels, x = drawn.integers(0, CLASSES, BATCH).astype(np.int32), drawn.normal(size=(BATCH, FEATURES))
        radius = 1 + labels + 0.2 * drawn.normal(size=BATCH)
        yield (x / np.linalg.norm(x, axis=1, keepdims=True) * radius[:, None]).astype(np.float32), labels


def train(microbatches=1):
    definition, params, statistics = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    key, optimizer = jax.random.key(1), transformation()
    state = optimizer.init(params)

    def loss_and_statistics(params, statistics, x, labels, key):
        model = nnx.merge(definition, params, statistics, copy=True)
        loss, accuracy = loss_of(model, x, labels, key)
        return loss, (accuracy, nnx.state(model, nnx.BatchStat))

    @jax.jit
    def step(params, statistics, state, key, x, labels):
        key, *keys = jax.random.split(key, 1 + microbatches)
        found = []
        for part in zip(jnp.split(x, microbatches), jnp.split(labels, microbatches), keys, strict=True):
            differentiated = jax.value_and_grad(loss_and_statistics, has_aux=True)
            (loss, (accuracy, statistics)), gradients = differentiated(params, statistics, *part)
            found.append((loss, accuracy, gradients))
        loss, accuracy, gradients = jax.tree.map(lambda *each: sum(each) / microbatches, *found)
        updates, state = optimizer.update(gradients, state, params)
        after = optax.apply_updates(params, updates)
        metrics = {"loss": loss, "accuracy": accuracy, "statistics": optax.tree.norm(statistics)}
        return after, statistics, state, key, metrics | norms(gradients, params, after)

    for x, labels in batches():
        params, statistics, state, key, metrics = step(params, statistics, state, key, x, labels)
        yield metrics
