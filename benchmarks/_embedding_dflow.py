"""The step of `benchmarks.embedding` by dflow, standalone or on a cluster; prints times and counts as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

COLUMNS = 64
LOOKUPS = 1024
WARM_UP = 10
RULES: dict[str, tuple[Callable[[], Any], bool]] = {
    "sgd": (lambda: optax.sgd(0.01), False),
    "adagrad": (lambda: optax.adagrad(0.01), False),
    "lazy_adam": (lambda: optax.adam(0.01), True),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=RULES, required=True)
    parser.add_argument("--millions", type=int, nargs="+", required=True)
    for name in ("steps", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    draw = np.random.default_rng(0)
    steps = {millions: make_step(cluster, given.rule, millions) for millions in given.millions}
    for millions, step in steps.items():
        for _ in range(WARM_UP):
            timed(step, batch(draw, millions))
    times: dict[int, list[list[float]]] = {millions: [] for millions in given.millions}
    for _ in range(given.rounds):
        for millions, step in steps.items():
            times[millions].append([timed(step, batch(draw, millions)) for _ in range(given.steps)])
    counted = {millions: counts(cluster, step, batch(draw, millions)) for millions, step in steps.items()}
    print("measured " + json.dumps({"times": times, "counted": counted}), flush=True)
    cluster.close()


def rows_of(millions: int) -> int:
    """Number of rows of each of the two tables."""
    return millions * 1_000_000 // COLUMNS // 2


def batch(draw: np.random.Generator, millions: int) -> tuple[Any, ...]:
    """Draw rows of both tables and the values to predict."""
    ids = [draw.integers(rows_of(millions), size=LOOKUPS, dtype=np.int32) for _ in range(2)]
    return *ids, draw.normal(size=LOOKUPS).astype(np.float32)


def make_step(cluster: Any, rule: str, millions: int) -> Any:
    """A training step over two tables."""
    transformation, lazy_rows = RULES[rule]
    count = rows_of(millions)
    with cluster.parameter_servers():
        tables = [
            dflow.Variable(lambda: jnp.full((count, COLUMNS), 0.1), name=f"{millions}/{name}")
            for name in ("users", "items")
        ]
        optimizer = dflow.Optimizer(transformation(), tables, name=f"{millions}/opt", lazy_rows=lazy_rows)

    @dflow.jit
    def step(users: Any, items: Any, wanted: Any) -> Any:
        def loss() -> Any:
            return jnp.mean(((tables[0][users] * tables[1][items]).sum(axis=1) - wanted) ** 2)

        value, gradients = dflow.value_and_grad(loss, tables)()
        optimizer.apply(gradients)
        return value

    return step


def timed(step: Any, given: tuple[Any, ...]) -> float:
    """Return the time of a step until its result is ready, in s."""
    started = time.perf_counter()
    jax.block_until_ready(step(*given))
    return time.perf_counter() - started


def counts(cluster: Any, step: Any, given: tuple[Any, ...]) -> dict[str, float]:
    """Measure a step's allocations and its reads and writes of variables; on a cluster also the worker's traffic."""
    if len(cluster.tasks) == 1:
        nodes = [node for node in dflow.graph(step, *given).graph.nodes if node.op.name.startswith("var.")]
        values = [value for node in nodes for value in (*node.inputs, *node.outputs)]
        touched = sum(getattr(value.type, "size_bytes", 0) for value in values)
        allocated = step.lower(*given).compile().memory_analysis().temp_size_in_bytes
        return {"temporary MB": allocated / 1e6, "touched MB": touched / 1e6}
    before = sum(edge.size_bytes for edge in cluster.traffic())
    step(*given)
    return {"sent KB": (sum(edge.size_bytes for edge in cluster.traffic()) - before) / 1e3}


if __name__ == "__main__":
    main()
