"""Train a Flax Linen model with batch norm and dropout on handwritten digits, in one process or on a cluster.

    python examples/libraries/with_linen.py
    dflow launch --ps 2 --workers 2 examples/libraries/with_linen.py

Parameters and batch statistics are two pytrees of variables; the step writes the statistics that the model changed.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dflow


class Classifier(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x, *, train) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(64)(x)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1000, help="training steps of all workers together")
    given = options.parse_args()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    data = dflow.data.batches((x[359:], y[359:]), 64, shuffle=True, epochs=None, drop_remainder=True)

    cluster = dflow.connect()
    model = Classifier()
    initial = model.init(jax.random.key(0), x[:1], train=False)
    with cluster.parameter_servers():
        params = dflow.variables(initial["params"])
        stats = dflow.variables(initial["batch_stats"], trainable=False)
        random = dflow.Generator(0, name="dropout")
        adam = dflow.Optimizer(optax.adam(1e-3), params, name="adam")

    @dflow.jit
    def train_step(images, labels):
        key = random.split()

        def loss():
            values = {"params": dflow.read(params), "batch_stats": dflow.read(stats)}
            logits, changed = model.apply(values, images, train=True, mutable=["batch_stats"], rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), changed["batch_stats"]

        (value, changed), gradients = dflow.value_and_grad(loss, params, has_aux=True)()
        dflow.assign(stats, changed)
        adam.apply(gradients)
        return {"loss": value}

    for _ in dflow.distributed.Async(cluster).run(train_step, lambda step: data[step], steps=given.steps):
        pass
    if cluster.elect("evaluation"):
        logits = model.apply({"params": dflow.read(params), "batch_stats": dflow.read(stats)}, x[:359], train=False)
        print(f"test accuracy {jnp.mean(logits.argmax(-1) == y[:359]):.4f} on 359 held-out images", flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
