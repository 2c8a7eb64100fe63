"""Increment a counter on each of two parameter tasks in each step of `Async`, and report the counters.

    counters.py STEPS SECONDS [MAX_STALENESS]

Each batch takes SECONDS to come, as from a slow disk. Every second worker looks ahead. At the end a worker reports the
results `count 0` and `count 1`, and with MAX_STALENESS each worker the most updates that a step of its last process
missed, as `missed by` and its name.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import dflow

steps, batch_s = int(sys.argv[1]), float(sys.argv[2])
max_staleness = int(sys.argv[3]) if len(sys.argv) > 3 else None
cluster = dflow.connect()
with cluster.parameter_servers():
    counters, totals = [], []
    for index in range(2):
        with dflow.device(f"ps:{index}"):
            counters.append(dflow.Variable(lambda: jnp.zeros((), jnp.int32), name=f"count {index}"))
            totals.append(dflow.Variable(lambda: jnp.zeros(1000, jnp.int32), name=f"total {index}"))


@dflow.jit
def step(x: jax.Array) -> Any:
    """Add 1 to each counter, and to each element of the totals; return the number of updates missed on each task."""
    missed = []
    for counter, total in zip(counters, totals, strict=True):
        seen = counter.read()
        counter.assign_add(x + 0 * seen)
        total.assign_add(jnp.full(1000, x))
        missed.append(counter.read() - 1 - seen)
    return missed


def batches() -> Iterator[jax.Array]:
    """Yield 1 without end."""
    while True:
        time.sleep(batch_s)
        yield jnp.int32(1)


most = 0
strategy = dflow.distributed.Async(cluster, max_staleness=max_staleness, lookahead=cluster.index % 2 == 1)
for missed in strategy.run(step, batches(), steps=steps, name="train"):
    most = max(most, *map(int, missed))
if max_staleness is not None:
    cluster.report(f"missed by {cluster.task}", most)
if cluster.elect("report"):
    for index in range(2):
        cluster.report(f"count {index}", float(counters[index].read()))
cluster.close()
