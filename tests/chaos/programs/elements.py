"""Take an element of a queue in each step, draw a ticket and a random key, and bring them to another task.

    elements.py Async|Sync STEPS SECONDS

Worker 0 feeds the queue, which is on one parameter task with the counter of tickets, a generator and an accumulator.
The variables that the steps bring these to are on the other one. Each batch takes SECONDS to come. At the end a worker
reports the numbers of elements and tickets that were brought once, and more often, those of gradients in the
accumulator and of different random bits, and the sum of all elements that were brought.
"""

import itertools
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

kind, steps, batch_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
#: Every step of `Sync` uses up to one element of each of three workers.
room = steps if kind == "Async" else 4 * steps
cluster = dflow.connect()
with cluster.parameter_servers():
    with dflow.device("ps:0"):
        queue = dflow.FIFOQueue(32, jax.ShapeDtypeStruct((), jnp.int32), name="elements")
        next_ticket = dflow.Variable(0, name="next ticket")
        noise = dflow.Generator(0, name="noise")
        gradients = dflow.ConditionalAccumulator(jnp.float32(0), name="gradients")
    with dflow.device("ps:1"):
        elements = dflow.Variable(lambda: jnp.zeros(room, jnp.int32), name="elements brought")
        tickets = dflow.Variable(lambda: jnp.zeros(room, jnp.int32), name="tickets brought")
        bits = dflow.Variable(lambda: jnp.zeros(room, jnp.uint32), name="bits brought")
        weight = dflow.Variable(lambda: jnp.zeros(()), name="weight")
    optimizer = dflow.Optimizer(optax.sgd(1.0), [weight], name="sgd")


@dflow.jit
def step(x: jax.Array) -> jax.Array:
    """Bring one element, one ticket and the bits of one key; return the element."""
    element = queue.dequeue()
    ticket = next_ticket.read()
    next_ticket.assign_add(x)
    gradients.apply(x.astype(jnp.float32))
    elements.scatter_add(element[None], x[None])
    tickets.scatter_add(ticket[None], x[None])
    bits.scatter_update(ticket[None], jax.random.bits(noise.split(), (1,)))
    optimizer.apply([jnp.float32(-1.0)])
    return element


def batches() -> Iterator[jax.Array]:
    """Yield 1 without end."""
    while True:
        time.sleep(batch_s)
        yield jnp.int32(1)


numbers = map(np.int32, range(steps) if kind == "Async" else itertools.count())
if cluster.index == 0:
    dflow.data.feed(numbers, queue, name="numbers")
strategy = getattr(dflow.distributed, kind)(cluster)
for _ in strategy.run(step, batches(), steps=steps, name="train"):
    pass
if cluster.elect("report"):
    for name, brought in (("elements", elements), ("tickets", tickets)):
        counts = np.asarray(brought.read())
        cluster.report(f"{name} once", int((counts == 1).sum()))
        cluster.report(f"{name} more often", int((counts > 1).sum()))
    cluster.report("gradients", int(gradients.count()))
    cluster.report("keys", len({*np.asarray(bits.read()).tolist()} - {0}))
    cluster.report("updates", float(weight.read()))
cluster.close()
