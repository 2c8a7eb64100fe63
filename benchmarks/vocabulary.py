"""What does a table's growing vocabulary cost: a step, and the first step?

*step*: one process looks up 4,096 ids of a table of 200,000 rows of 16 and updates the rows by Adagrad. All ids have
rows, or 2% of them are new in each step. *first step*: a model of two towers, each with a table of 100,000 rows and two
dense layers, on 2 ps tasks and a worker in one process; it is mostly XLA's compilation. *job*: a launched job of 2 ps
tasks and 2 workers that takes this step and ends, without compiled programs of an earlier start (*cold*) and with them
(*warm*); all its processes, imports included. Times are those of the processor, over all threads. `/ plain` is the
ratio to a table of row numbers in the same round.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow
from benchmarks._launched import figures_in, launched
from benchmarks._paired import in_turn, median_ratio, options, publish
from dflow.testing import memory_cluster

ROWS, IDS, DIM = 200_000, 4096, 16
KINDS = {"plain": 0.0, "vocabulary": 0.0, "vocabulary, 2% new": 0.02}
#: For a process of this file: the kind of the tables whose first step it takes.
FIRST = "BENCHMARK_FIRST_STEP"

_draw = np.random.default_rng(0)


def main() -> None:
    given = options(__doc__, rounds=9, steps=100, starts=3, jobs=3)
    if kind := os.environ.get(FIRST):
        taken = step_of_a_job(kind) if "DFLOW_COORDINATOR" in os.environ else first_step(kind)
        print("measured " + json.dumps({"cpu_s": taken}), flush=True)
        return
    made = {kind: step_of(kind, new) for kind, new in KINDS.items()}
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        kind: lambda made=made: timed(*made, given.steps) for kind, made in made.items()
    }
    rows = lines("step", "ms", in_turn(ways, given.rounds), 1e3)
    starts = {kind: lambda kind=kind: (started(kind),) for kind in ("plain", "vocabulary")}
    rows += lines("first step", "s", in_turn(starts, given.starts), 1.0)
    jobs = in_turn({kind: lambda kind=kind: jobs_of(kind) for kind in starts}, given.jobs)
    for number, start in enumerate(("job, cold", "job, warm") if given.jobs else ()):
        rows += lines(start, "s", {kind: [each[number] for each in found] for kind, found in jobs.items()}, 1.0)
    publish("vocabulary", rows, as_json=given.json)


def lines(what: str, unit: str, found: dict[str, list[tuple[float, ...]]], scale: float) -> list[dict[str, Any]]:
    """Return a row for each kind of table: processor times, and waiting times if they were measured."""
    rows = []
    for kind, times in found.items():
        row: dict[str, Any] = {"what": what, "table": kind, "unit": unit}
        for number, name in enumerate(("processor", "wall")[: len(times[0])]):
            own, plain = ([each[number] for each in one] for one in (times, found["plain"]))
            ratio, low, high = median_ratio(own, plain)
            row |= {name: scale * statistics.median(own)}
            row |= {f"{name} / plain": ratio, f"{name} p10": low, f"{name} p90": high} if kind != "plain" else {}
        rows.append(row)
    return rows


def timed(step: Any, batch: Callable[[], Any], steps: int) -> tuple[float, float]:
    """Return the processor time and the time of a step, in s."""
    batches = [batch() for _ in range(steps)]
    processor, wall = time.process_time(), time.perf_counter()
    for one in batches:
        float(step(*one))
    return (time.process_time() - processor) / steps, (time.perf_counter() - wall) / steps


def step_of(kind: str, new: float) -> tuple[Any, Callable[[], Any]]:
    """A training step over a table, and a function that draws its batch. Nearly all old ids have rows already."""
    is_plain = kind == "plain"
    settings = {} if is_plain else {"vocabulary": dflow.Vocabulary()}
    table = dflow.Embedding(ROWS, DIM, name=kind.replace(",", "").replace("%", ""), **settings)
    optimizer = dflow.Optimizer(optax.adagrad(0.05), [table])

    @dflow.jit
    def step(ids: Any, wanted: Any) -> Any:
        found = ids if is_plain else table.find(ids)

        def loss() -> Any:
            return ((table(found).sum(-1) - wanted) ** 2).mean()

        value, gradients = dflow.value_and_grad(loss, [table])()
        optimizer.apply(gradients, **({} if is_plain else {"found": found}))
        return value

    def batch(share: float = new) -> Any:
        ids = _draw.integers(0, ROWS // 2, IDS)
        if not is_plain:
            fresh = _draw.integers(2**50, 2**62, IDS)
            ids = np.where(_draw.random(IDS) < share, fresh, ids * 2**33 + 5)
        return ids.astype(np.int32) if is_plain else dflow.wide_ids(ids), _draw.random(IDS, dtype=np.float32)

    for _ in range(2 if is_plain else 4 * ROWS // IDS):
        step(*batch(0.0))
    return step, batch


def started(kind: str) -> float:
    """Return the processor time of a first step in a new process, in s."""
    command = [sys.executable, "-m", "benchmarks.vocabulary"]
    root, environment = Path(__file__).parents[1], {**os.environ, FIRST: kind}
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=True)
    return float(figures_in(ended.stdout)["cpu_s"])


def jobs_of(kind: str) -> list[tuple[float, float]]:
    """Return the processor time and the time, in s, of a launched job, and of a second one after it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {FIRST: kind, "XDG_CACHE_HOME": folder}),
    ):
        return [job() for _ in range(2)]


def job() -> tuple[float, float]:
    """Return the processor time, over all processes, and the time of a job that takes one step, in s."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    figures_in(launched("vocabulary.py", [], ps=2, workers=2, timeout_s=600).stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - begun


def first_step(kind: str) -> float:
    """Return the processor time of the first step of two towers in a cluster within this process, in s."""
    with memory_cluster(ps=2, workers=1) as tasks, contextlib.closing(tasks.worker()) as cluster:
        return first_step_on(cluster, kind)


def step_of_a_job(kind: str) -> float:
    """Return the processor time of the first step in this worker of a launched job, in s."""
    with contextlib.closing(dflow.connect()) as cluster:
        return first_step_on(cluster, kind)


def first_step_on(cluster: Any, kind: str) -> float:
    """Return the processor time of the first step of two towers, in s."""
    is_plain = kind == "plain"
    settings = {} if is_plain else {"vocabulary": dflow.Vocabulary()}
    with cluster.parameter_servers():
        tables = [dflow.Embedding(ROWS // 2, DIM, name=name, **settings) for name in ("users", "items")]
        layers = [[dflow.Variable(lambda: jnp.eye(DIM), name=f"{name}{layer}") for layer in range(2)] for name in "ui"]
        optimizer = dflow.Optimizer(optax.adagrad(0.05), [tables, layers])

    @dflow.jit
    def step(ids: list[Any], wanted: Any) -> Any:
        found = ids if is_plain else [table.find(one) for table, one in zip(tables, ids, strict=True)]

        def loss() -> Any:
            towers = [
                jax.nn.relu(table(one) @ first) @ second
                for table, one, (first, second) in zip(tables, found, layers, strict=True)
            ]
            return ((towers[0] * towers[1]).sum(-1) - wanted).var()

        value, gradients = dflow.value_and_grad(loss, [tables, layers])()
        optimizer.apply(gradients, **({} if is_plain else {"found": found}))
        return value

    drawn = [_draw.integers(0, ROWS // 2, 1024) for _ in tables]
    ids = [one.astype(np.int32) if is_plain else dflow.wide_ids(one * 2**33 + 5) for one in drawn]
    begun = time.process_time()
    float(step(ids, _draw.random(1024, dtype=np.float32)))
    return time.process_time() - begun


if __name__ == "__main__":
    main()
