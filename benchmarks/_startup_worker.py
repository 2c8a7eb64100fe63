"""A worker of `benchmarks.startup`: variables of random values, Adam, one step; prints its times as JSON."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dflow

SHAPE = (64, 64)
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variables", type=int, required=True)
    parser.add_argument("--began", type=float, required=True, help="when the process was started, by `time.time`")
    given = parser.parse_args()
    times: dict[str, float] = {"imports": time.time() - given.began}
    processor: dict[str, float] = {"imports": time.process_time()}

    def lap(what: str) -> None:
        times[what] = time.time() - given.began - sum(times.values())
        processor[what] = time.process_time() - sum(processor.values())

    cluster = dflow.connect()
    lap("join")
    with cluster.parameter_servers():
        variables = [dflow.Variable(random_value(number), name=f"v{number}") for number in range(given.variables)]
    lap("variables")
    optimizer = dflow.Optimizer(optax.adam(1e-3), variables, name="adam")
    lap("slots")

    @dflow.jit
    def step(x: Any) -> Any:
        def loss() -> Any:
            return sum(jnp.mean((x @ variable) ** 2) for variable in variables)

        value, gradients = dflow.value_and_grad(loss, variables)()
        optimizer.apply(gradients)
        return value

    float(step(jnp.ones((BATCH, SHAPE[0]))))
    lap("first step")
    print("times " + json.dumps({"elapsed": times, "processor": processor}), flush=True)
    cluster.close()


def random_value(number: int) -> Any:
    """Return an initialiser whose numbers are used by no other variable."""
    return lambda: jax.random.normal(jax.random.key(number), SHAPE) * (0.02 + number * 1e-6)


if __name__ == "__main__":
    main()
