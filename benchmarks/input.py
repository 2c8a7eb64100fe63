"""Compare a training step that takes its batch from `dflow.data.feed` with one whose batch is already present.

Records of 784 floats in batches of 64, and a step of matrix products of some tens of ms. The alternatives, in random
order in each round: one batch passed as an argument; batches that were all in the queue before, without a feed; a feed
by `dflow.data.feed` from `batches` (shuffled), whose thread works on the same cores as the step; a feed from a source
that only waits, like a disk or a network, and returns a prepared batch; and, by hand, a thread that puts
`jax.device_put` of the same shuffled batches into a `queue.Queue`, from where the step takes them as arguments. Each
feed is stopped before the next measurement.

Measured are wall time, and the processor time of the whole process, which other programs disturb less. Measured
separately: the records per second of a step that only dequeues, and the input's work for one batch.
"""

from __future__ import annotations

import itertools
import queue as queues
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish, seconds_per_call

BATCH, WIDTH, HIDDEN = 64, 784, 1024
CALLS = 20
AHEAD = 8

#: Time that the waiting source takes for a batch, in s.
WAIT_S = 0.005

#: Wall time and processor time of a step, in s.
Took = tuple[float, float]


def main() -> None:
    given = options(__doc__, rounds=15, layers=6)
    data = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)
    source = iter(shuffled(data))
    own = statistics.median(seconds_per_call(lambda: jnp.array(next(source)), CALLS) for _ in range(given.rounds))
    rate = statistics.median(taken(data) for _ in range(given.rounds))
    ways = steps(data, given.layers)
    in_turn(ways, 2)
    found = in_turn(ways, given.rounds)
    rows = []
    for way, base in {"argument": "argument", "filled": "filled", **dict.fromkeys(("fed", "waits"), "filled")}.items():
        rows.append(row(way, base, found))
    rows.append(row("by hand", "argument", found))
    publish("input", rows, as_json=given.json)
    publish("input_alone", [{"records/s": rate, "input's work, us a batch": own * 1e6}], as_json=given.json)


def row(way: str, base: str, found: dict[str, list[Took]]) -> dict[str, Any]:
    walls = {name: [wall for wall, _ in found[name]] for name in (way, base)}
    owns = {name: [own for _, own in found[name]] for name in (way, base)}
    ratio, low, high = median_ratio(walls[way], walls[base])
    return {
        "batches": way,
        "step, ms": statistics.median(walls[way]) * 1e3,
        "processors, ms": statistics.median(owns[way]) * 1e3,
        "beside": base,
        "time / its": ratio,
        "p10": low,
        "p90": high,
        "processors / its": median_ratio(owns[way], owns[base])[0],
    }


def shuffled(data: np.ndarray) -> Any:
    return dflow.data.batches(data, BATCH, shuffle=True, epochs=None, drop_remainder=True)


def waiting(batch: np.ndarray) -> Iterator[np.ndarray]:
    while True:
        time.sleep(WAIT_S)
        yield batch


def new_queue() -> dflow.FIFOQueue:
    return dflow.FIFOQueue(AHEAD, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


def taken(data: np.ndarray) -> float:
    """Return the records per second of a function that only dequeues."""
    queue = new_queue()
    take = dflow.jit(queue.dequeue)
    with dflow.data.feed(shuffled(data), queue):
        return BATCH / seconds_per_call(lambda: jax.block_until_ready(take()), 200)


def steps(data: np.ndarray, layers: int) -> dict[str, Callable[[], Took]]:
    keys = jax.random.split(jax.random.key(0), layers + 1)
    variables = [
        dflow.Variable(jax.random.normal(key, (HIDDEN if number else WIDTH, HIDDEN)) * 0.03, name=f"w{number}")
        for number, key in enumerate(keys)
    ]

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

    batch = jnp.asarray(data[:BATCH])
    ready, queue = dflow.FIFOQueue(CALLS, new_queue().spec), new_queue()
    by_argument = dflow.jit(update)
    from_ready = dflow.jit(lambda: update(ready.dequeue()))
    from_queue = dflow.jit(lambda: update(queue.dequeue()))

    def filled() -> Took:
        for _ in range(CALLS):
            ready.enqueue(batch)
        return timed(from_ready)

    def fed(source: Any) -> Took:
        with dflow.data.feed(source, queue, close=False):
            return timed(from_queue)

    def by_hand() -> Took:
        ahead: queues.Queue[jax.Array] = queues.Queue(AHEAD)
        elements = itertools.islice(shuffled(data), CALLS)
        thread = threading.Thread(target=lambda: [ahead.put(jax.device_put(element)) for element in elements])
        thread.start()
        took = timed(lambda: by_argument(ahead.get()))
        thread.join()
        return took

    return {
        "argument": lambda: timed(lambda: by_argument(batch)),
        "filled": filled,
        "fed": lambda: fed(shuffled(data)),
        "waits": lambda: fed(waiting(data[:BATCH])),
        "by hand": by_hand,
    }


def timed(step: Callable[[], Any]) -> Took:
    own = time.process_time()
    wall = seconds_per_call(lambda: jax.block_until_ready(step()), CALLS)
    return wall, (time.process_time() - own) / CALLS


if __name__ == "__main__":
    main()
