"""Many workers of `benchmarks.many_workers` in one process: each is a task with separate connections, and a thread.

A step of `train` is `--count` steps of each worker, concurrently. A worker's step fetches all variables and updates
them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dflow
from benchmarks._train import train
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task_role import join_cluster
from dflow.distributed.transport.sockets import SocketTransport
from dflow.state_backends import LOCAL

VARIABLES, SHAPE = 4, (64, 64)


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--count", type=int, required=True, help="steps of each worker in one step of the crowd")
    parser.add_argument("--indices", type=int, nargs="+", required=True)
    given = parser.parse_args()
    transport = SocketTransport()
    clusters = [
        join_cluster(given.coordinator, transport, job="worker", index=index, store=LOCAL.store)
        for index in given.indices
    ]
    steps = [make_step(cluster) for cluster in clusters]

    def work(step: Callable[..., Any]) -> float:
        return [float(step(jnp.ones((1, SHAPE[0])))) for _ in range(given.count)][-1]

    with ThreadPoolExecutor(len(steps)) as pool:
        train(lambda: max(pool.map(work, steps)), began)
    for cluster in clusters:
        cluster.close()


def make_step(cluster: Cluster) -> Callable[..., Any]:
    """Return a step of gradient descent on all variables."""
    with cluster.parameter_servers():
        variables = [dflow.Variable(lambda: jnp.ones(SHAPE), name=f"v{number}") for number in range(VARIABLES)]
        optimizer = dflow.Optimizer(optax.sgd(1e-6), variables, name="sgd")

    @dflow.jit
    def step(x: jax.Array) -> Any:
        loss = dflow.value_and_grad(lambda: sum(jnp.mean((x @ variable) ** 2) for variable in variables), variables)
        value, gradients = loss()
        optimizer.apply(gradients)
        return value

    return step


if __name__ == "__main__":
    main()
