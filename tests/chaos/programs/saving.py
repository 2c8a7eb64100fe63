"""Count steps of `Async` on two parameter tasks, while worker 0 writes checkpoints and exports of the counters.

    saving.py STEPS SECONDS EVERY FOLDER

Each batch takes SECONDS to come, as from a slow disk. Worker 0 saves a checkpoint after each EVERY of its steps, and an
export after half as many more; one that fails is told, and the next one is tried. At the end it saves both again, and a
worker reports the results `count 0` and `count 1`.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import dflow

#: Most attempts at the last checkpoint; after these, StopIteration ends the program.
TRIES = 20

steps, batch_s, every, folder = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
cluster = dflow.connect()
with cluster.parameter_servers():
    counters = []
    for index in range(2):
        with dflow.device(f"ps:{index}"):
            counters.append(dflow.Variable(lambda: jnp.zeros(1000, jnp.int32), name=f"count {index}"))


@dflow.jit
def step(x: jax.Array) -> None:
    """Add 1 to each element of the counters."""
    for counter in counters:
        counter.assign_add(jnp.full(1000, x))


@dflow.jit
def counts(x: jax.Array) -> Any:
    """Return the first element of each counter."""
    return [counter.read()[0] + 0 * x.sum() for counter in counters]


def batches() -> Iterator[jax.Array]:
    """Yield 1 without end."""
    while True:
        time.sleep(batch_s)
        yield jnp.int32(1)


def tried(what: str, save: Any) -> bool:
    """Save; return whether it has not failed."""
    try:
        save()
    except dflow.DflowError as error:
        print(f"{what} failed: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


def export(number: int) -> None:
    """Export the function for one more size of its argument."""
    sizes = [jax.ShapeDtypeStruct((1 + number,), jnp.int32)]
    dflow.export(counts, *sizes).save(f"{folder}/exports/{number}", overwrite=True)
    counts(jnp.zeros(1 + number, jnp.int32))


with dflow.CheckpointManager(f"{folder}/checkpoints", counters, every=every, keep=1000) as manager:
    number = manager.next_step
    for _ in dflow.distributed.Async(cluster).run(step, batches(), steps=steps, name="train"):
        tried("a checkpoint", lambda number=number: manager.step(number))
        if cluster.index == 0 and number % every == every // 2:
            tried("an export", lambda number=number: export(number))
        number += 1
    if cluster.index == 0:
        tries = iter(range(number, number + TRIES))
        while not tried("the last checkpoint", lambda: (manager.save(next(tries)), manager.wait())):
            pass
        export(steps)
if cluster.elect("report"):
    for index in range(2):
        [value] = {*counters[index].read().tolist()}
        cluster.report(f"count {index}", float(value))
cluster.close()
