"""Uses of state on parameter tasks: plain steps, each strategy with its options, the trainer and evaluation."""

from __future__ import annotations

import contextlib
import csv
import functools
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import dflow
from dflow.distributed import Async, Strategy, Sync
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.testing import memory_cluster
from tests.composition.kind import NUMBERS, Batch, Held, Outcome, Pair, Use
from tests.composition.kinds_of_training import Slots
from tests.composition.uses_in_process import all_together, in_cond, in_scan, one_by_one

#: Deadlines of a cluster whose tasks are all here.
SETTINGS = ClusterSettings(step_timeout_s=60)


@contextlib.contextmanager
def two_workers() -> Iterator[list[Cluster]]:
    """Two parameter tasks and two workers in this process."""
    with (
        memory_cluster(ps=2, workers=2) as memory,
        closing(memory.worker(0, SETTINGS)) as first,
        closing(memory.worker(1, SETTINGS)) as second,
    ):
        yield [first, second]


@contextlib.contextmanager
def one_worker() -> Iterator[Cluster]:
    """Two parameter tasks and a worker in this process."""
    with memory_cluster(ps=2, workers=1) as memory, closing(memory.worker(0, SETTINGS)) as worker:
        yield worker


def on_tasks(use: Callable[[Pair], Outcome]) -> Callable[[Pair, Cluster], Outcome]:
    """Run a use of one process with its state on parameter tasks."""

    def run(pair: Pair, cluster: Cluster) -> Outcome:
        make = pair.make

        def made(part: str = "", **division: int) -> Held:
            with cluster.parameter_servers():
                return make(part, **division)

        pair.make = made  # type: ignore[method-assign]
        return use(pair)

    return run


class EachStep(Strategy):
    """A strategy of one's own: each worker does all its steps."""

    run_prefix = "each"

    def results(self, run: Any) -> Iterator[Any]:
        yield from run.calls(range(run.steps))


def by_one_worker(strategy: Callable[[Cluster], Strategy], results: bool = True) -> Callable[[Pair, Cluster], Outcome]:
    """Train by a strategy with one worker, whose steps follow each other. Late results are not compared."""

    def run(pair: Pair, cluster: Cluster) -> Outcome:
        with cluster.parameter_servers():
            held = pair.make()
        reference = pair.kind.reference()
        batches = pair.batches()
        found = list(strategy(cluster).run(dflow.jit(held.step), iter(batches), steps=len(batches), name=named(pair)))
        expected = [reference.step(given) for given in batches]
        outcome = [("content", held.state(), reference.state())]
        return [("results", np.array(found), np.array(expected)), *outcome] if results else outcome

    return run


def named(pair: Pair) -> str:
    """Return the name of the run of a pair."""
    return f"{pair.use} of {pair.kind.name}"


def on_all(clusters: list[Cluster], work: Callable[[int, Cluster], Any]) -> list[Any]:
    """Do what each worker's program does, in a thread for each."""
    with ThreadPoolExecutor(len(clusters)) as pool:
        running = [pool.submit(work, index, cluster) for index, cluster in enumerate(clusters)]
        for first in as_completed(running):
            first.result()  # others may fail because the first did
        return [one.result() for one in running]


def asynchronously(pair: Pair, clusters: list[Cluster]) -> Outcome:
    """Share six equal steps between two workers."""
    given = pair.batches((1,))[0]

    def work(index: int, cluster: Cluster) -> Held:
        with cluster.parameter_servers():
            held = pair.make()
        list(Async(cluster).run(dflow.jit(held.step), lambda step: given, steps=6, name=named(pair)))
        cluster.barrier(named(pair), timeout_s=SETTINGS.step_timeout_s)
        return held

    held = on_all(clusters, work)[0]
    reference = pair.kind.reference()
    for _ in range(6):
        reference.step(given)
    if isinstance(pair.kind, Slots):
        # Steps at the same time may read slots of several versions: each weight goes the reference's way, more or less.
        start = pair.kind.reference().state()
        went, expected = held.state() - start, reference.state() - start
        np.testing.assert_allclose(went / expected, 1, atol=0.6)
        return [("direction", np.sign(went), np.sign(expected))]
    return [("content", held.state(), reference.state())]


class Companion:
    """A weight that is trained beside state that is not, since a synchronous step gives gradients."""

    def __init__(self, pair: Pair) -> None:
        self.w = dflow.Variable(lambda: jnp.ones(2), name=f"{named(pair)}/companion")
        self._sgd = dflow.Optimizer(optax.sgd(0.5), [self.w], name=f"{named(pair)}/sgd")

    def train(self, given: Batch) -> None:
        """Apply the gradient of a batch: the mean of its x, twice."""
        self._sgd.apply(dflow.grad(lambda: self.w.sum() * jnp.mean(given["x"]), [self.w])())


def synchronously(strategy: Callable[[Cluster], Strategy], backups: bool = False) -> Callable[..., Outcome]:
    """Do three rounds with two workers.

    Their batches differ where gradients are averaged. They are equal where a step writes, since the writes of a round
    come in any order, which queues and sums of eight bits show; and with backup workers, since either one's may count.
    """

    def run(pair: Pair, clusters: list[Cluster]) -> Outcome:
        trains = pair.kind.trains
        differ = trains and not backups

        def batches(index: int) -> list[Batch]:
            return pair.batches([2 * number + index if differ else 1 for number in NUMBERS])

        def work(index: int, cluster: Cluster) -> tuple[Held, Any, int]:
            with cluster.parameter_servers():
                held = pair.make()
                companion = None if trains else Companion(pair)

            def step(given: Batch) -> Any:
                result = held.step(given)
                if companion is not None:
                    companion.train(given)
                return result

            run = strategy(cluster).run(dflow.jit(step), batches(index), steps=len(NUMBERS), name=named(pair))
            steps = sum(1 for _ in run)
            cluster.barrier(named(pair), timeout_s=SETTINGS.step_timeout_s)
            return held, companion, steps

        done = on_all(clusters, work)
        reference, means = pair.kind.reference(), 0.0
        # With backup workers, a worker whose gradient came too late may pass over a round: each does three or fewer.
        for number in NUMBERS:
            for index, (_, _, steps) in enumerate(done):
                if number < steps:
                    reference.write(batches(index)[number])
            both = pair.joined([2 * number, 2 * number + 1] if differ else [1, 1])
            reference.train(both)
            means += both["x"].mean()
        held, companion, _ = done[0]
        outcome: Outcome = [("content", held.state(), reference.state())]
        if companion is not None:
            outcome.append(("companion", companion.w.read(), np.full(2, 1 - 0.5 * means)))
        return outcome

    return run


def by_a_trainer(pair: Pair, cluster: Cluster) -> Outcome:
    """Train by `dflow.Trainer`, and evaluate at the end where the state can be read."""
    with cluster.parameter_servers():
        held = pair.make()
    reference, batches = pair.kind.reference(), pair.batches()
    last = pair.batches((5,))
    options = {"evaluation": (dflow.jit(held.look), last), "evaluate_every": 3} if held.look else {}
    trainer = dflow.Trainer(dflow.jit(held.step), Async(cluster), progress=False, **options)
    result = trainer.run(lambda number: batches[number], steps=len(batches), name=named(pair))
    for given in batches:
        reference.step(given)
    content = reference.state()
    outcome: Outcome = [("content", held.state(), content)]
    if held.look:
        outcome.append(("evaluation", next(iter(result.evaluation.values())), reference.step(last[0])))
    return outcome


def evaluated(pair: Pair, cluster: Cluster) -> Outcome:
    """Evaluate a function that reads the state, over two batches; of state that can't be read so, the step."""
    with cluster.parameter_servers():
        held = pair.make()
    batches = pair.batches((0, 1))
    found = dflow.evaluate(dflow.jit(held.look or held.step), batches)
    expected = np.mean([pair.kind.reference().step(given) for given in batches])
    return [("mean", next(iter(found.values())), expected), ("content", held.state(), pair.kind.reference().state())]


def logged(pair: Pair, cluster: Cluster) -> Outcome:
    """Write the result of each step to a CSV file."""
    with cluster.parameter_servers():
        held = pair.make()
    reference, batches = pair.kind.reference(), pair.batches()
    step = dflow.jit(lambda given: {"seen": held.step(given)})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.csv"
        with dflow.loggers.CSV(path) as log:
            for number, metrics in enumerate(Async(cluster).run(step, iter(batches), steps=3, name=named(pair))):
                log.log(number, metrics)
        rows = list(csv.DictReader(path.read_text().splitlines()))
    found = [float(row["seen"]) for row in rows]
    return [("rows", found, [reference.step(given) for given in batches])]


def uses(heading: str, room: Any, runs: dict[str, Any]) -> list[Use]:
    """Return uses that share a room."""
    return [Use(name, heading, run, room) for name, run in runs.items()]


USES = [
    *uses(
        "on parameter tasks",
        one_worker,
        {
            "steps on tasks": on_tasks(lambda pair: one_by_one(pair, lambda held: dflow.jit(held.step))),
            "eager on tasks": on_tasks(lambda pair: one_by_one(pair, lambda held: held.step)),
            "cond on tasks": on_tasks(in_cond),
            "scan on tasks": on_tasks(lambda pair: all_together(pair, in_scan)),
            "Async": by_one_worker(Async),
            "Async(max_staleness=0)": by_one_worker(functools.partial(Async, max_staleness=0)),
            "Async(prefetch=1)": by_one_worker(functools.partial(Async, prefetch=1), results=False),
            "Async(lookahead=True)": by_one_worker(functools.partial(Async, lookahead=True), results=False),
            "a strategy of one's own": by_one_worker(EachStep),
            "Trainer": by_a_trainer,
            "evaluate": evaluated,
            "loggers.CSV": logged,
        },
    ),
    *uses(
        "by several workers",
        two_workers,
        {
            "Async, 2 workers": asynchronously,
            "Sync, 2 workers": synchronously(Sync),
            "Sync(backup_workers=1)": synchronously(functools.partial(Sync, backup_workers=1), backups=True),
        },
    ),
]
