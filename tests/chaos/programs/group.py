"""Train the integer model by `AllReduce` or `Hybrid`, with a checkpoint after some steps; it goes on.

    group.py STRATEGY STEPS SECONDS EVERY FOLDER

Each batch takes SECONDS to come, as from a slow disk. The newest checkpoint in FOLDER is that of the last step.
"""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from integer_model import DIVISOR, examples, first_values

import dflow

kind, steps, batch_s, every, folder = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
cluster = dflow.connect(collectives=True)
strategy: Any
if kind == "Hybrid":
    strategy = dflow.distributed.Hybrid(cluster)
    of_table = cluster.parameter_servers()
else:
    # The table is divided among the workers, and the dense weights are too small for that.
    strategy = dflow.distributed.AllReduce(cluster, fully_sharded=True)
    of_table = strategy.variables()
part, parts = strategy.part


def update(gradients: Any, momentum: Any, params: Any = None) -> Any:
    """Return the updates and the new momentum, of whole numbers."""
    momentum = jax.tree.map(lambda g, m: jnp.floor(m / 2) + jnp.round(g), gradients, momentum)
    return jax.tree.map(lambda m: -jnp.floor(m / DIVISOR), momentum), momentum


by_integers = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
with of_table:
    table = dflow.Variable(lambda: first_values()["table"], name="table")
    table_optimizer = dflow.Optimizer(by_integers, [table], name="table's")
with strategy.variables():
    w = dflow.Variable(lambda: first_values()["w"], name="w")
    optimizer = dflow.Optimizer(by_integers, [w], name="w's")


@dflow.jit
def step(ids: jax.Array, x: jax.Array) -> Any:
    """Update both by the sums over the examples of all workers."""

    def loss() -> Any:
        rows, dense = table[ids], x @ w
        seen, looked_up = jax.lax.stop_gradient((dense, rows.sum(1)))
        of_dense = dense * jnp.mod(looked_up + seen, 7)
        total = jnp.sum(of_dense + (rows * x).sum(1) * (jnp.mod(seen, 5) + 1))
        # `Hybrid` averages the gradients of the workers.
        return total * parts if kind == "Hybrid" else total

    value, (of_w, of_rows) = dflow.value_and_grad(loss, [[w], [table]])()
    optimizer.apply(of_w)
    table_optimizer.apply(of_rows)
    return value


def batch(number: int) -> Any:
    """Return this worker's part of a step's examples."""
    time.sleep(batch_s)
    return tuple(np.split(array, parts)[part] for array in examples(number // parts))


state = {"w": w, "table": table, "w's": optimizer, "table's": table_optimizer}
with dflow.CheckpointManager(folder, state, every=every) as manager:
    first = manager.next_step
    print("begins at", first, flush=True)
    for number, _ in enumerate(strategy.run(step, batch, steps=steps, name="train", first=first), first):
        manager.step(number)
    if manager.last_step < steps - 1:
        manager.save(steps - 1)
cluster.close()
