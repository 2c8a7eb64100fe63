"""A worker of `benchmarks.recovery`: trains with `Async` until it is killed, and records when each step has ended.

Each step adds to 64 rows of each table on the ps tasks. The time of its end, by the clock that all processes of the
machine share, goes into a file of this process, which survives SIGKILL.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow

#: Number of tables of each ps task, and the rows that a step looks up in each.
TABLES, COLUMNS, BATCH = 4, 64, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ps", type=int, required=True)
    parser.add_argument("--mib", type=int, required=True, help="size of the tables of each ps task")
    parser.add_argument("--ends", type=Path, required=True, help="folder for the times")
    given = parser.parse_args()
    rows = rows_of(given.mib)
    cluster = dflow.connect()
    with cluster.parameter_servers():
        tables = dflow.variables([lambda: jnp.zeros((rows, COLUMNS))] * (TABLES * given.ps))

    @dflow.jit
    def step(indices: Any) -> Any:
        found = [table.gather(indices) for table in tables]
        for table, values in zip(tables, found, strict=True):
            table.scatter_add(indices, 0.001 * (1.0 - values))
        return sum(jnp.mean(values) for values in found)

    order = np.random.default_rng(cluster.index)
    batches = (order.integers(rows, size=BATCH, dtype=np.int32) for _ in itertools.count())
    with open(given.ends / f"worker:{cluster.index}.{os.getpid()}", "wb", buffering=0) as ends:
        for loss in dflow.distributed.Async(cluster).run(step, batches, steps=10**9, name="training"):
            jax.block_until_ready(loss)
            ends.write(np.float64(time.monotonic()).tobytes())


def rows_of(mib: int) -> int:
    """Return the number of rows of each table of a ps task that holds `mib` MiB."""
    return mib * 2**20 // (TABLES * COLUMNS * np.dtype("float32").itemsize)


if __name__ == "__main__":
    main()
