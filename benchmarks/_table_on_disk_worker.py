"""The worker of `benchmarks.table_on_disk`: trains a table on ps tasks, and prints its figures."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

import dflow

COLUMNS = 16
#: Spreads the rows that are used often over the table: a prime, so that no two numbers get one row.
SPREAD = 2_654_435_761


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rows", "ids", "steps", "warm", "rounds", "limit"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--zipf", type=float, required=True)
    parser.add_argument("--order", required=True)
    parser.add_argument("--optimizer", required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    started = time.perf_counter()
    with cluster.parameter_servers():
        table = dflow.Embedding(given.rows, COLUMNS, name="table", max_memory=given.limit or None)
        optimizer = dflow.Optimizer(getattr(optax, given.optimizer)(0.05), [table], name="optimizer")
    made_s = time.perf_counter() - started

    @dflow.jit
    def step(ids: Any, wanted: Any) -> Any:
        def loss() -> Any:
            return ((table(ids).sum(-1) - wanted) ** 2).mean()

        value, gradients = dflow.value_and_grad(loss, [table])()
        optimizer.apply(gradients)
        return value

    batch = batches(given)

    def train(steps: int) -> float:
        drawn = [batch() for _ in range(steps)]
        started = time.perf_counter()
        for _ in dflow.distributed.Async(cluster).run(step, iter(drawn), steps=steps):
            pass
        return steps * given.ids / (time.perf_counter() - started)

    train(given.warm)
    figures = {"made s": made_s, "examples/s": [train(given.steps) for _ in range(given.rounds)]}
    print("measured " + json.dumps(figures), flush=True)
    cluster.close()


def batches(given: argparse.Namespace) -> Callable[[], Any]:
    """Return a function that draws a batch: ranks by a Zipf distribution, which are rows or are spread over them."""
    draw = np.random.default_rng(0)

    def batch() -> Any:
        rank = draw.zipf(given.zipf, given.ids * 2)
        rank = np.resize(rank[rank <= given.rows], given.ids) - 1
        ids = rank * SPREAD % given.rows if given.order == "spread" else rank
        return ids.astype(np.int32), draw.random(given.ids, dtype=np.float32)

    return batch


if __name__ == "__main__":
    main()
