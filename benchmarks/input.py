"""How many records a second go through `dflow.data.feed`, and what does a step cost that takes its batch from it?

Records of 784 floats in batches of 64. First the feed alone, with a step that only takes; then a step of matrix
products, in turn: with one batch that is an argument; with batches dequeued that were all in the queue before, nobody
feeding; and with batches that are fed meanwhile. The input's own work (slicing the batch out
of an array, copying it) is done by the feed's thread, on the same cores as the step's; it is measured by itself too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish, seconds_per_call

BATCH, WIDTH, HIDDEN = 64, 784, 1024
CALLS = 20


def main() -> None:
    given = options(__doc__, rounds=15, layers=6)
    data = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)
    queue = dflow.FIFOQueue(8, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32), name="input")
    batches = dflow.data.batches(data, BATCH, shuffle=True, epochs=None, drop_remainder=True)
    source = iter(batches)
    own = statistics.median(seconds_per_call(lambda: jnp.array(next(source)), CALLS) for _ in range(given.rounds))
    with dflow.data.feed(batches, queue):
        take = dflow.jit(queue.dequeue)
        rates = [BATCH / seconds_per_call(lambda: jax.block_until_ready(take()), 200) for _ in range(given.rounds)]
        ways = steps(queue, jnp.asarray(data[:BATCH]), given.layers)
        in_turn(ways, 2)
        found = in_turn(ways, given.rounds)
    ratio, low, high = median_ratio(found["fed"], found["filled"])
    row = {
        "records/s": statistics.median(rates),
        "input's own work, us a batch": own * 1e6,
        **{f"{way} ms": statistics.median(times) * 1e3 for way, times in found.items()},
        "fed / filled": ratio,
        "p10": low,
        "p90": high,
        "fed / argument": median_ratio(found["fed"], found["argument"])[0],
    }
    publish("input", [row], as_json=given.json)


def steps(queue: Any, batch: jax.Array, layers: int) -> dict[str, Callable[[], float]]:
    keys = jax.random.split(jax.random.key(0), layers + 1)
    first = dflow.Variable(jax.random.normal(keys[0], (WIDTH, HIDDEN)) * 0.03, name="first")
    inner = [
        dflow.Variable(jax.random.normal(key, (HIDDEN, HIDDEN)) * 0.03, name=f"w{n}") for n, key in enumerate(keys[1:])
    ]
    variables = [first, *inner]

    def update(x: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            y = x
            for variable in variables:
                y = jnp.tanh(y @ variable.read())
            return (y**2).mean()

        value, gradients = dflow.value_and_grad(loss, variables)()
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(1e-3 * gradient)
        return value

    ready = dflow.FIFOQueue(CALLS, queue.spec, name="ready")
    by_argument = dflow.jit(update)
    from_ready = dflow.jit(lambda: update(ready.dequeue()))
    fed = dflow.jit(lambda: update(queue.dequeue()))

    def filled() -> float:
        for _ in range(CALLS):
            ready.enqueue(batch)
        return seconds_per_call(lambda: jax.block_until_ready(from_ready()), CALLS)

    return {
        "argument": lambda: seconds_per_call(lambda: jax.block_until_ready(by_argument(batch)), CALLS),
        "filled": filled,
        "fed": lambda: seconds_per_call(lambda: jax.block_until_ready(fed()), CALLS),
    }


if __name__ == "__main__":
    main()
