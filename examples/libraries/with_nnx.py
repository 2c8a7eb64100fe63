"""Train a Flax NNX model with batch norm and dropout on handwritten digits, in one process or on a cluster.

    python examples/libraries/with_nnx.py
    dflow launch --ps 2 --workers 2 examples/libraries/with_nnx.py

The model is split into its definition, its parameters and its other state; a step merges them with the variables'
values, and writes the state that the model changed.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import dflow


class Classifier(nnx.Module):
    """Two dense layers."""

    def __init__(self, rngs) -> None:
        self.hidden, self.norm = nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
        self.dropout, self.logits = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x) -> jax.Array:
        return self.logits(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1000, help="training steps of all workers together")
    given = options.parse_args()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    data = dflow.data.batches((x[359:], y[359:]), 64, shuffle=True, epochs=None, drop_remainder=True)

    cluster = dflow.connect()
    definition, parameters, others = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param, ...)
    with cluster.parameter_servers():
        params = dflow.variables(parameters)
        state = dflow.variables(others, trainable=False)  # batch statistics, and the keys of the dropout
        adam = dflow.Optimizer(optax.adam(1e-3), params, name="adam")

    @dflow.jit
    def train_step(images, labels):
        def loss():
            model = nnx.merge(definition, dflow.read(params), dflow.read(state))
            model.train()
            value = optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, changed), gradients = dflow.value_and_grad(loss, params, has_aux=True)()
        dflow.assign(state, changed)
        adam.apply(gradients)
        return {"loss": value}

    for _ in dflow.distributed.Async(cluster).run(train_step, lambda step: data[step], steps=given.steps):
        pass
    if cluster.elect("evaluation"):
        model = nnx.merge(definition, dflow.read(params), dflow.read(state))
        model.eval()
        print(f"test accuracy {jnp.mean(model(x[:359]).argmax(-1) == y[:359]):.4f} on 359 held-out images", flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
