"""Train a Haiku model with batch norm and dropout on handwritten digits, in one process or on a cluster.

    python examples/libraries/with_haiku.py
    dflow launch --ps 2 --workers 2 examples/libraries/with_haiku.py

Parameters and state of `hk.transform_with_state` are two pytrees of variables.
"""

import argparse

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dflow


def classifier(x, train):
    """Two dense layers."""
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Linear(64)(x), train))
    return hk.Linear(10)(hk.dropout(hk.next_rng_key(), 0.2, x) if train else x)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1000, help="training steps of all workers together")
    given = options.parse_args()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    data = dflow.data.batches((x[359:], y[359:]), 64, shuffle=True, epochs=None, drop_remainder=True)

    cluster = dflow.connect()
    model = hk.transform_with_state(classifier)
    initial = model.init(jax.random.key(0), x[:2], True)
    with cluster.parameter_servers():
        params, state = dflow.variables(initial[0]), dflow.variables(initial[1], trainable=False)
        random = dflow.Generator(0, name="dropout")
        adam = dflow.Optimizer(optax.adam(1e-3), params, name="adam")

    @dflow.jit
    def train_step(images, labels):
        key = random.split()

        def loss():
            logits, changed = model.apply(dflow.read(params), dflow.read(state), key, images, True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), changed

        (value, changed), gradients = dflow.value_and_grad(loss, params, has_aux=True)()
        dflow.assign(state, changed)
        adam.apply(gradients)
        return {"loss": value}

    for _ in dflow.distributed.Async(cluster).run(train_step, lambda step: data[step], steps=given.steps):
        pass
    if cluster.elect("evaluation"):
        logits, _ = model.apply(dflow.read(params), dflow.read(state), None, x[:359], False)
        print(f"test accuracy {jnp.mean(logits.argmax(-1) == y[:359]):.4f} on 359 held-out images", flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
