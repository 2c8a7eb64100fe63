"""A worker of `benchmarks.soak`: runs many steps and samples all processes of the cluster; prints JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from benchmarks._launched import processes

ROWS, COLUMNS = 10_000, 64
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("steps", "looks", "workers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    with cluster.parameter_servers():
        table = dflow.Variable(lambda: jnp.zeros((ROWS, COLUMNS)), name="table")
        weights = dflow.Variable(lambda: jnp.zeros((COLUMNS, 8)), name="weights")
        arrived = dflow.FIFOQueue(given.workers, jnp.float32(0), name="arrived")
        tokens = dflow.FIFOQueue(given.workers, jnp.float32(0), name="tokens")

    @dflow.jit
    def step(indices: Any) -> Any:
        """Read and write rows and a dense variable, and wait at a barrier."""
        rows = table.gather(indices)
        weights.assign_add(rows.T @ jnp.ones((BATCH, 8)) * 1e-6)
        table.scatter_add(indices, jnp.full((BATCH, COLUMNS), 1e-6))
        arrived.enqueue(rows.sum())
        if cluster.index:
            return tokens.dequeue()
        # Worker 0 takes no token: another worker's next step could take it first.
        together = arrived.dequeue_many(given.workers)
        tokens.enqueue_many(together[1:])
        return together[0]

    order = np.random.default_rng(cluster.index)
    every = given.steps // given.looks
    looks = []
    for number in range(given.steps + 1):
        if cluster.index == 0 and number % every == 0:
            gc.collect()
            looks.append({"steps": number, "tasks": look()})
        jax.block_until_ready(step(order.integers(ROWS, size=BATCH, dtype=np.int32)))
    if cluster.index == 0:
        print("looks " + json.dumps(looks), flush=True)
    cluster.close()


def look() -> dict[str, dict[str, int]]:
    """Return memory, descriptors and threads of each process that the launcher has started."""
    return {role: held_by(process) for role, process in processes(os.getppid()).items()}


def held_by(process: int) -> dict[str, int]:
    """Return anonymous resident memory in kB, and the numbers of descriptors and threads."""
    folder = Path(f"/proc/{process}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "kB": int(status["RssAnon"].split()[0]),
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
    }


if __name__ == "__main__":
    main()
