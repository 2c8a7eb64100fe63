"""Pass elements through each kind of queue in steps, draw a random key, and bring all to another task.

    elements.py Async|Sync STEPS SECONDS [loop]

The queues are on one parameter task, with a generator and an accumulator. A step puts its number into each queue, and
takes an element of each. It counts the elements in variables on the other task. Each batch takes SECONDS to come. With
`loop` the elements are taken in a loop and a branch. At the end a worker reports the numbers of elements that were
counted once, and more often, and the counts of gradients, of different random bits, and of updates.
"""

import sys
import time

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
        number = jax.ShapeDtypeStruct((), jnp.int32)
        queues = {
            "fifo": dflow.FIFOQueue(64, number, name="fifo"),
            "shuffle": dflow.RandomShuffleQueue(64, 0, number, seed=0, name="shuffle"),
            "priority": dflow.PriorityQueue(64, number, name="priority"),
            "padding": dflow.PaddingFIFOQueue(64, dflow.PaddedSpec((), jnp.int32), name="padding"),
        }
        noise = dflow.Generator(0, name="noise")
        gradients = dflow.ConditionalAccumulator(jnp.float32(0), name="gradients")
    with dflow.device("ps:1"):
        elements = {name: dflow.Variable(lambda: jnp.zeros(room, jnp.int32), name=f"{name} brought") for name in queues}
        numbers = dflow.Variable(lambda: jnp.zeros(room, jnp.int32), name="numbers brought")
        bits = dflow.Variable(lambda: jnp.zeros(room, jnp.uint32), name="bits brought")
        weight = dflow.Variable(lambda: jnp.zeros(()), name="weight")
    optimizer = dflow.Optimizer(optax.sgd(1.0), [weight], name="sgd")


def take(queue: dflow.FIFOQueue) -> jax.Array:
    """Take an element, in a loop and a branch if asked for."""
    if "loop" not in sys.argv:
        taken: jax.Array = queue.dequeue()
        return taken

    def turn(last: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.cond(last < 0, queue.dequeue, lambda: last), None

    return jax.lax.scan(turn, jnp.int32(-1), None, length=2)[0]


@dflow.jit
def step(number: jax.Array) -> None:
    """Bring one element of each queue, the step's number and the bits of one key."""
    one = jnp.ones(1, jnp.int32)
    for name, queue in queues.items():
        queue.enqueue(number)
        elements[name].scatter_add(take(queue)[None], one)
    gradients.apply(jnp.float32(1.0))
    numbers.scatter_add(number[None], one)
    bits.scatter_update(number[None], jax.random.bits(noise.split(), (1,)))
    optimizer.apply([jnp.float32(-1.0)])


def batch(number: int) -> jax.Array:
    """The batch of a step: its number."""
    time.sleep(batch_s)
    return jnp.int32(number)


strategy = getattr(dflow.distributed, kind)(cluster)
for _ in strategy.run(step, batch, steps=steps, name="train"):
    pass
if cluster.elect("report"):
    for name, brought in {**elements, "numbers": numbers}.items():
        counts = np.asarray(brought.read())
        cluster.report(f"{name} once", int((counts == 1).sum()))
        cluster.report(f"{name} more often", int((counts > 1).sum()))
    cluster.report("gradients", int(gradients.count()))
    cluster.report("keys", len({*np.asarray(bits.read()).tolist()} - {0}))
    cluster.report("updates", float(weight.read()))
cluster.close()
