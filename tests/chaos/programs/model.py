"""Train a small model by `Sync` with Adam, and write its weights into a file.

    model.py STEPS SECONDS FILE

Each batch takes SECONDS to come, as from a slow disk; it is a function of the number of Adam's updates, the same on all
workers. The gradients are rounded so that the average of up to 3 equal gradients equals each of them, whichever workers
gave them.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

steps, batch_s, file = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
cluster = dflow.connect()
with cluster.parameter_servers():
    model = {}
    for index, (name, shape) in enumerate({"first": (8, 16), "second": (16, 4)}.items()):
        with dflow.device(f"ps:{index}"):
            model[name] = dflow.Variable(np.full(shape, 0.125, np.float32), name=name)
    optimizer = dflow.Optimizer(optax.adam(0.01), model, name="adam")


def loss(x: jax.Array) -> jax.Array:
    """Return the squared error of the model's answer for rows f32[32,8]."""
    answer = jnp.tanh(x @ model["first"]) @ model["second"]
    return jnp.mean((answer - jnp.sin(3 * x[:, :4])) ** 2)


@dflow.jit
def step(_: jax.Array) -> Any:
    """Run Adam's next update; return the loss."""
    number = optimizer.slots[0].count.read()
    x = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), (32, 8))
    value, gradients = dflow.value_and_grad(loss, model)(x)
    optimizer.apply(jax.tree.map(lambda gradient: jax.lax.reduce_precision(gradient, 8, 12), gradients))
    return value


def batches() -> Iterator[jax.Array]:
    """Yield 0 without end."""
    while True:
        time.sleep(batch_s)
        yield jnp.int32(0)


for _ in dflow.distributed.Sync(cluster).run(step, batches(), steps=steps, name="train"):
    pass
if cluster.elect("report"):
    with open(file, "wb") as out:
        np.savez(out, **dflow.read(model))
    cluster.report("updates", float(optimizer.slots[0].count.read()))
cluster.close()
