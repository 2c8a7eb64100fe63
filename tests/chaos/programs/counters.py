"""Increment a counter on each of two parameter tasks in each step of `Async`, and report the counters.

    counters.py STEPS SECONDS

Each batch takes SECONDS to come, as from a slow disk. At the end a worker reports the results `count 0` and `count 1`.
"""

import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import dflow

steps, batch_s = int(sys.argv[1]), float(sys.argv[2])
cluster = dflow.connect()
with cluster.parameter_servers():
    counters, totals = [], []
    for index in range(2):
        with dflow.device(f"ps:{index}"):
            counters.append(dflow.Variable(lambda: jnp.zeros((), jnp.int32), name=f"count {index}"))
            totals.append(dflow.Variable(lambda: jnp.zeros(1000, jnp.int32), name=f"total {index}"))


@dflow.jit
def step(x: jax.Array) -> None:
    """Add 1 to each counter, and to each element of the totals."""
    for counter, total in zip(counters, totals, strict=True):
        counter.assign_add(x)
        total.assign_add(jnp.full(1000, x))


def batches() -> Iterator[jax.Array]:
    """Yield 1 without end."""
    while True:
        time.sleep(batch_s)
        yield jnp.int32(1)


for _ in dflow.distributed.Async(cluster).run(step, batches(), steps=steps, name="train"):
    pass
if cluster.elect("report"):
    for index in range(2):
        cluster.report(f"count {index}", float(counters[index].read()))
cluster.close()
