"""A variational autoencoder in plain JAX: it learns pictures of a bar, and its prior is faded in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.ports.norms import norms

SIDE, HIDDEN, LATENT, BATCH, STEPS, FADED_IN = 8, 32, 4, 32, 50, 25


def initial_parameters():
    drawn = np.random.default_rng(0)

    def layer(size_in, size_out):
        w = drawn.normal(size=(size_in, size_out)) / np.sqrt(size_in)
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(size_out)}

    return {
        "encoder": [layer(SIDE * SIDE, HIDDEN), layer(HIDDEN, 2 * LATENT)],
        "decoder": [layer(LATENT, HIDDEN), layer(HIDDEN, SIDE * SIDE)],
    }


def network(layers, x):
    first, second = layers
    return jnp.tanh(x @ first["w"] + first["b"]) @ second["w"] + second["b"]


def loss_of(params, pictures, key, weight):
    """Return the loss of reconstruction and of the distance from the prior, and the fraction of correct pixels."""
    mean, log_scale = jnp.split(network(params["encoder"], pictures), 2, axis=1)
    latent = mean + jnp.exp(log_scale) * jax.random.normal(key, mean.shape)
    logits = network(params["decoder"], latent)
    rebuilt = optax.sigmoid_binary_cross_entropy(logits, pictures).sum(axis=1).mean()
    left = (0.5 * (mean**2 + jnp.exp(2 * log_scale) - 1) - log_scale).sum(axis=1).mean()
    metrics = {"rebuilt": rebuilt, "left": left, "accuracy": ((logits > 0) == (pictures > 0.5)).mean()}
    return rebuilt + weight * left, metrics


def transformation():
    return optax.adam(1e-2)


def batches():
    """Pictures with one row or one column set."""
    drawn = np.random.default_rng(0)
    for _ in range(STEPS):
        place, is_row = drawn.integers(0, SIDE, BATCH), drawn.random(BATCH) < 0.5
        bars = np.eye(SIDE, dtype=np.float32)[place][:, :, None] * np.ones(SIDE, np.float32)
        yield np.where(is_row[:, None, None], bars, bars.swapaxes(1, 2)).reshape(BATCH, SIDE * SIDE)


def train(microbatches=1):
    params, key = initial_parameters(), jax.random.key(1)
    optimizer = transformation()
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key, number, pictures):
        weight = jnp.minimum(number / FADED_IN, 1.0)
        key, *keys = jax.random.split(key, 1 + microbatches)
        differentiated = jax.value_and_grad(loss_of, has_aux=True)
        parts = jnp.split(pictures, microbatches)
        found = [differentiated(params, part, each, weight) for part, each in zip(parts, keys, strict=True)]
        (loss, metrics), gradients = jax.tree.map(lambda *each: sum(each) / microbatches, *found)
        updates, state = optimizer.update(gradients, state, params)
        after = optax.apply_updates(params, updates)
        return after, state, key, {"loss": loss, **metrics, **norms(gradients, params, after)}

    for number, pictures in enumerate(batches()):
        params, state, key, metrics = step(params, state, key, number, pictures)
        yield metrics
