"""A worker of `benchmarks.replicas`: trains on digits with a stated time for each gradient, and prints times as JSON.

The time of computing a gradient on an accelerator is a wait within the step here, longer for stragglers. Thus
a machine has room for all workers, and the times have the stated distribution.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dflow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("sync", "async"), required=True)
    for name in ("backups", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("compute", "slow", "slow-by", "target", "rate"):
        parser.add_argument(f"--{name}", type=float, required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    with cluster.parameter_servers():
        weights = dflow.Variable(lambda: jnp.zeros((64, 10)), name="weights")
        optimizer = dflow.Optimizer(optax.sgd(given.rate), [weights], name="optimizer")

    def loss(x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(x @ weights, y).mean()

    index = int(cluster.task.rpartition(":")[2])
    draw = np.random.default_rng(index)

    def computed(x: Any) -> Any:
        is_slow = draw.random() < given.slow
        time.sleep(given.compute * (1 + 0.05 * draw.standard_normal() ** 2 + given.slow_by * is_slow))
        return x

    @dflow.jit
    def step(x: Any, y: Any) -> Any:
        x = jax.pure_callback(computed, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        value, gradients = dflow.value_and_grad(lambda: loss(x, y), [weights])()
        optimizer.apply(gradients)
        return value

    whole = dflow.jit(lambda: loss(images, labels))

    def batches() -> Iterator[Any]:
        while True:
            chosen = draw.integers(len(images), size=32)
            yield images[chosen], labels[chosen]

    if given.strategy == "sync":
        strategy: Any = dflow.distributed.Sync(cluster, backup_workers=given.backups)
    else:
        strategy = dflow.distributed.Async(cluster)
    whole()
    cluster.barrier("ready")
    began, times, reached = time.perf_counter(), [], None
    for _ in strategy.run(step, batches(), steps=given.steps, name="run"):
        times.append(time.perf_counter() - began)
        if index == 0 and reached is None and whole() < given.target:
            reached = time.perf_counter() - began
    if index == 0:
        print("measured " + json.dumps({"times": times, "reached": reached}), flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
