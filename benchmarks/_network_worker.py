"""A worker of `benchmarks.network`: times steps of dflow and their bytes over plain sockets; prints JSON.

*delays*: on each round, for each delay and loss of the link, all ways to do a step, in random order. *rate*: transfers
of large variables. The worker with index 0 measures; the others only take part in synchronous steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow
from benchmarks import _clicks, _clicks_dflow
from benchmarks._paired import in_turn
from benchmarks._plain_exchange import TLS_PORT, PlainClient
from benchmarks._slow_link import Control

VARIABLES, SIDE, BATCH = 20, 64, 8
#: Rows of the table of the click-through model, and examples of its batches; options of `Async` for its steps.
ROWS, CLICKS_BATCH = 100_000, 64
LOOKUPS: dict[str, Any] = {
    "lookups": {},
    "lookahead": {"lookahead": True},
    "prefetch": {"lookahead": True, "prefetch": 1},
}
#: Bytes of the values that a training step reads, and of its gradients.
STEP_BYTES = VARIABLES * SIDE * SIDE * 4
#: Steps before each measurement, for the sockets to adapt to the link.
WARM_UP = 5
PINGS = 10
#: Bytes sent over the link without delay, to see what it can carry.
CARRIED_BYTES = 50_000_000
#: Steps of an asynchronous run. It does only a few, and claims as many at a time as a long run does.
LONG_RUN = 1_000_000

Way = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--strategies", nargs="+", required=True)
    parser.add_argument("--links", type=json.loads, default=[], help="pairs of a delay in s and a loss")
    parser.add_argument("--control", type=Path)
    parser.add_argument("--mb", type=int)
    parser.add_argument("--servers", nargs="+", required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    if given.mb:
        found: Any = rates(cluster, given)
    elif cluster.index == 0:
        found = delays(cluster, given)
    else:
        found = [float(loss) for loss in steps_of(cluster, given, training_step(cluster), "Sync")]
    print("found " + json.dumps(found), flush=True)
    cluster.close()


def delays(cluster: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Return what the link carries, in MB/s, and what was found on each round for each state of the link.

    That is the round-trip time, and the times of all steps by way, in s.
    """
    link = Control(given.control)
    link.set(0.0, 0.0)
    step, x = training_step(cluster), jnp.ones((BATCH, SIDE))
    plain, nearest = PlainClient(given.servers), PlainClient(given.servers[:1])
    carried_s = [timed(partial(nearest.exchange, 0, CARRIED_BYTES)) for _ in range(3)]
    trained = {name: step for name in given.strategies if name in ("Async", "Sync")}
    if looks_up := [name for name in given.strategies if name in LOOKUPS]:
        trained |= dict.fromkeys(looks_up, _clicks_dflow.make_step(cluster, ROWS, None))
    runs = {name: steps_of(cluster, given, one, name) for name, one in trained.items()}
    ways: dict[str, Way] = {name: partial(next_of, run) for name, run in runs.items()}
    if "step" in given.strategies:
        ways["step"] = lambda: float(step(x))
    ways["sockets"] = partial(plain.step, STEP_BYTES)
    found, orders = [], random.Random(0)
    # Loss comes last: the sockets send less for a while after it.
    clean, lossy = ([each for each in given.links if bool(each[1]) == loses] for loses in (False, True))
    for links in (*[clean] * given.rounds, *[lossy] * given.rounds):
        for delay_s, loss in orders.sample(links, len(links)):
            link.set(delay_s, loss)
            pings = [timed(partial(nearest.exchange, 0, 1)) for _ in range(PINGS)]
            times: dict[str, list[float]] = {}
            for name in orders.sample(list(ways), len(ways)):
                for _ in range(WARM_UP):
                    ways[name]()
                times[name] = [timed(ways[name]) for _ in range(given.steps)]
            trip_s = statistics.median(pings)
            found.append({"delay": delay_s, "loss": loss, "trip": trip_s, "times": times})
    link.set(0.0, 0.0)
    for run in runs.values():
        run.close()
    return {"carries": CARRIED_BYTES / 1e6 / statistics.median(carried_s), "rounds": found}


def steps_of(cluster: Any, given: argparse.Namespace, step: Any, name: str) -> Any:
    """Return the results of a run of `step` by a strategy: one for each step that is measured, or more."""
    strategy = dflow.distributed.Sync if name == "Sync" else partial(dflow.distributed.Async, **LOOKUPS.get(name, {}))
    count = given.rounds * len(given.links) * (given.steps + WARM_UP)
    batches: Any = iter(lambda: jnp.ones((BATCH, SIDE)), None)
    if name in LOOKUPS:
        batches = itertools.cycle([_clicks.draw(number, CLICKS_BATCH, ROWS) for number in range(16)])
    return strategy(cluster).run(step, batches, steps=count if name == "Sync" else LONG_RUN, name=name)


def next_of(run: Any) -> float:
    return float(next(run))


def training_step(cluster: Any) -> Any:
    """Return a training step with Adam on small variables."""

    def values(seed: int) -> Callable[[], Any]:
        numbers = np.random.default_rng(seed).normal(size=(SIDE, SIDE), scale=SIDE**-0.5).astype(np.float32)
        return lambda: jnp.asarray(numbers)

    with cluster.parameter_servers():
        weights = [dflow.Variable(values(number), name=f"weights_{number}") for number in range(VARIABLES)]
        optimizer = dflow.Optimizer(optax.adam(1e-4), weights, name="adam")

    def loss(x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    @dflow.jit
    def step(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(loss, weights)(x)
        optimizer.apply(gradients)
        return value

    return step


def rates(cluster: Any, given: argparse.Namespace) -> dict[str, list[float]]:
    """Return the times of steps on `mb` MB by way, in s."""
    size_bytes = given.mb * 1_000_000
    plain, secured = PlainClient(given.servers), PlainClient(given.servers, TLS_PORT)
    ways: dict[str, Way] = {}
    for count in (1, 10):
        ways[f"fetch {count}"], ways[f"train {count}"] = dense_steps(cluster, size_bytes // 4 // count, count)
    for name, client in {"sockets": plain, "TLS": secured}.items():
        ways[f"{name} fetch"] = partial(client.exchange, 0, size_bytes)
        ways[f"{name} train"] = partial(client.step, size_bytes)
    timings = {name: partial(timed, way) for name, way in ways.items()}
    in_turn(timings, 2)
    return in_turn(timings, given.rounds)


def dense_steps(cluster: Any, numbers: int, count: int) -> tuple[Way, Way]:
    """Return a step that reads `count` variables of as many `numbers`, and one that also sends gradients of all."""
    with cluster.parameter_servers():
        parts = [dflow.Variable(lambda: jnp.ones(numbers), name=f"part_{index}_of_{count}") for index in range(count)]

    @dflow.jit
    def fetch(x: Any) -> Any:
        return x + sum(part.read()[0] for part in parts)

    @dflow.jit
    def train(x: Any) -> Any:
        values = [part.read() for part in parts]
        for part, value in zip(parts, values, strict=True):
            part.assign_add(x * value)
        return sum(value[0] for value in values)

    x = jnp.float32(1e-9)
    return lambda: jax.block_until_ready(fetch(x)), lambda: jax.block_until_ready(train(x))


def timed(way: Way) -> float:
    """Return the time of a call, in s."""
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
