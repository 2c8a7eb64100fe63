"""A worker of `benchmarks.null_step`: runs the step by dflow and over raw sockets in alternation; prints JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from benchmarks._raw_sockets import RawClient

#: Columns of the embedding, as in the paper's sparse workload.
COLUMNS = 256
ROWS_FETCHED = 32
#: The sparse step also runs on a table this many times smaller, to see whether the size matters.
SMALLER = 16
WARM_UP = 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("scalar", "dense", "sparse"), required=True)
    for name in ("ps", "workers", "mb", "steps", "rounds", "ask", "reply"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    given = parser.parse_args()

    cluster = dflow.connect()
    step = make_step(cluster, given)
    raw = RawClient(given.ports, given.ask, given.reply)
    ways: dict[str, Callable[[], Any]] = {"dflow": step, "raw": raw.step}
    if given.kind == "sparse":
        smaller = argparse.Namespace(**{**vars(given), "mb": given.mb // SMALLER})
        ways["smaller"] = make_step(cluster, smaller, "smaller_")
    times: dict[str, list[list[float]]] = {way: [] for way in ways}
    for way in ways.values():
        for _ in range(WARM_UP):
            way()
    for _ in range(given.rounds):
        for name, way in ways.items():
            times[name].append([timed(way) for _ in range(given.steps)])
    raw.close()
    print("times " + json.dumps(times), flush=True)
    cluster.close()


def timed(way: Callable[[], Any]) -> float:
    """Return the time of a call until its result is ready, in s."""
    started = time.perf_counter()
    jax.block_until_ready(way())
    return time.perf_counter() - started


def make_step(cluster: Any, given: argparse.Namespace, prefix: str = "") -> Callable[[], Any]:
    """The paper's null step: fetch from every shard, compute next to nothing, update every shard, wait for all workers.

    The names of its variables and queues begin with `prefix`.
    """
    shape = shard_shape(given)
    with cluster.parameter_servers():
        shards = []
        for index in range(given.ps):
            # By sizes alone, small shards may all go to one task.
            with dflow.device(f"ps:{index}"):
                shards.append(dflow.Variable(lambda: jnp.zeros(shape), name=f"{prefix}shard_{index}"))
        counts = [
            dflow.Variable(lambda: jnp.zeros(()), name=f"{prefix}count_{index}", near=shard)
            for index, shard in enumerate(shards)
        ]
        with dflow.device("ps:0"):
            arrived = dflow.FIFOQueue(given.workers, jnp.float32(0), name=f"{prefix}arrived")
            tokens = dflow.FIFOQueue(given.workers, jnp.float32(0), name=f"{prefix}tokens")

    def update(seen: Any) -> Any:
        """Update, and wait at a barrier: each worker enqueues a token, and worker 0 returns one to each other worker.

        Worker 0 takes none itself: another worker's next step could take it first, and all would wait forever.
        """
        for count in counts:
            count.assign_add(seen * 0 + 1)
        if given.workers == 1:
            return seen
        arrived.enqueue(seen)
        if cluster.index:
            return tokens.dequeue()
        together = arrived.dequeue_many(given.workers)
        tokens.enqueue_many(together[1:])
        return together[0]

    @dflow.jit
    def whole() -> Any:
        return update(sum(shard.read().reshape(-1)[0] for shard in shards))

    @dflow.jit
    def rows(indices: Any) -> Any:
        return update(sum(shard.gather(indices).reshape(-1)[0] for shard in shards))

    if given.kind != "sparse":
        return whole
    order = np.random.default_rng(0)
    return lambda: rows(order.integers(shape[0], size=ROWS_FETCHED // given.ps, dtype=np.int32))


def shard_shape(given: argparse.Namespace) -> tuple[int, ...]:
    """The f32 shape of the variable on each ps task."""
    if given.kind == "scalar":
        return ()
    numbers = given.mb * 1_000_000 // 4 // given.ps
    return (numbers,) if given.kind == "dense" else (numbers // COLUMNS, COLUMNS)


if __name__ == "__main__":
    main()
