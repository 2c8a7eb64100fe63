"""Train an Equinox model with dropout on handwritten digits, in one process or on a cluster.

    python examples/libraries/with_equinox.py
    dflow launch --ps 2 --workers 2 examples/libraries/with_equinox.py

`eqx.partition` divides the model into its arrays, which become variables, and the rest.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dflow


class Classifier(eqx.Module):
    """Two dense layers, for one image."""

    hidden: eqx.nn.Linear
    logits: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key) -> None:
        first, second = jax.random.split(key)
        self.hidden, self.logits = eqx.nn.Linear(64, 64, key=first), eqx.nn.Linear(64, 10, key=second)
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, x, key=None) -> jax.Array:
        return self.logits(self.dropout(jax.nn.relu(self.hidden(x)), key=key, inference=key is None))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1000, help="training steps of all workers together")
    given = options.parse_args()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    data = dflow.data.batches((x[359:], y[359:]), 64, shuffle=True, epochs=None, drop_remainder=True)

    cluster = dflow.connect()
    arrays, rest = eqx.partition(Classifier(jax.random.key(0)), eqx.is_inexact_array)
    with cluster.parameter_servers():
        params = dflow.variables(arrays)
        random = dflow.Generator(0, name="dropout")
        adam = dflow.Optimizer(optax.adam(1e-3), params, name="adam")

    @dflow.jit
    def train_step(images, labels):
        keys = random.split(len(images))

        def loss():
            logits = jax.vmap(eqx.combine(dflow.read(params), rest))(images, keys)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = dflow.value_and_grad(loss, params)()
        adam.apply(gradients)
        return {"loss": value}

    for _ in dflow.distributed.Async(cluster).run(train_step, lambda step: data[step], steps=given.steps):
        pass
    if cluster.elect("evaluation"):
        logits = jax.vmap(eqx.combine(dflow.read(params), rest))(x[:359])
        print(f"test accuracy {jnp.mean(logits.argmax(-1) == y[:359]):.4f} on 359 held-out images", flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
