"""A worker of `benchmarks.billion`: trains tables of two sizes by rounds, and prints times and bytes as JSON."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import dflow
from benchmarks._embedding_dflow import COLUMNS, timed

#: Examples in a batch, and ids of each, which are summed.
BATCH, BAG = 256, 8
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    for name in ("steps", "rounds", "ps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    draw = np.random.default_rng(0)
    made_s, steps = {}, {}
    for rows in given.rows:
        began_s = time.monotonic()
        steps[rows] = make_step(cluster, rows, given.ps)
        made_s[rows] = time.monotonic() - began_s
        for _ in range(WARM_UP):
            timed(steps[rows], batch(draw, rows))
    times: dict[int, list[list[float]]] = {rows: [] for rows in given.rows}
    for _ in range(given.rounds):
        for rows, step in steps.items():
            times[rows].append([timed(step, batch(draw, rows)) for _ in range(given.steps)])
    sent = {}
    for rows, step in steps.items():
        before = sum(edge.size_bytes for edge in cluster.traffic())
        timed(step, batch(draw, rows))
        sent[rows] = sum(edge.size_bytes for edge in cluster.traffic()) - before
    print("measured " + json.dumps({"times": times, "made_s": made_s, "sent": sent}), flush=True)
    cluster.close()


def batch(draw: np.random.Generator, rows: int) -> tuple[Any, ...]:
    """Draw the ids of a batch and the values to predict."""
    ids = draw.integers(rows, size=(BATCH, BAG), dtype=np.int32)
    return ids, draw.normal(size=BATCH).astype(np.float32)


def make_step(cluster: dflow.distributed.Cluster, rows: int, ps: int) -> Any:
    """A training step over one table."""
    with cluster.parameter_servers():
        table = dflow.Embedding(rows, COLUMNS, shards=ps, name=f"table {rows}")
        weights = dflow.Variable(jnp.ones(COLUMNS), name=f"weights {rows}")
        optimizer = dflow.Optimizer(optax.adagrad(0.01), [table, weights], name=f"optimizer {rows}")

    @dflow.jit
    def step(ids: Any, wanted: Any) -> Any:
        def loss() -> Any:
            return jnp.mean((table.bag(ids) @ weights - wanted) ** 2)

        value, gradients = dflow.value_and_grad(loss, [table, weights])()
        optimizer.apply(gradients)
        return value

    return step


if __name__ == "__main__":
    main()
