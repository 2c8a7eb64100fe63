"""How many examples a second does a cluster train, beside TensorFlow's parameter servers and PyTorch's DDP?

*clicks* is a click-through model (`_clicks`): 26 categorical fields hashed into one table of 1,000,000 rows with 16
columns, 13 numbers, layers of 64, 32 and 1, Adagrad for all of them, and batches of 512 on each of 2 workers. dflow
trains it on 2 ps tasks, by `Async`, `Sync` and `Hybrid`. `--beside PYTHON` names an environment with TensorFlow and
PyTorch: *TensorFlow* is asynchronous, in graph mode, with as many tasks; *PyTorch* is DistributedDataParallel over gloo
with sparse gradients, whose 2 processes have the whole table each. `--torchrec PYTHON` names one with TorchRec
(`torchrec fbgemm-gpu-cpu`), whose 2 processes have half of the rows each.

Initial values, batches and rule are the same. `examples/s` counts the examples of both workers in a round, until the
slower one has ended. A way's `loss` is the mean over all examples of the last round, before their update. In each round
the losses of the asynchronous ways, and of the synchronous ones, must differ by less than `SAME`, and those of
all ways by less than `NEAR`: an update of the latter averages two gradients, so they make half as many.

*dense* is a model of 2 million parameters with Adam and batches of 32, trained by `AllReduce`, by `Sync`, by a script
of JAX alone with the engine of `AllReduce` (its multi-process runtime over gloo), and by DDP; the losses must agree as
`_trainers` says.

All ways live at the same time and alternate, a round of steps each; the idle ones wait for their input. Each process
computes in one thread. `cpu ms` is the processor time of all processes of a way for a batch of each worker.
`/ way` is the ratio of the examples/s to those of the way, round by round, with its 10th and 90th percentile.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks._cluster import ONE_THREAD, running_peers, running_tasks, standalone
from benchmarks._models import BATCH
from benchmarks._paired import in_turn, median_ratio, options, publish
from benchmarks._trainers import Round, Way, rounds_of
from benchmarks.startup import free_port
from benchmarks.sync_steps import by_dflow, by_torch, started

PS, WORKERS = 2, 2
#: Rows of the table, and examples of a batch of one worker.
ROWS, CLICKS_BATCH = 1_000_000, 512
#: Those of dflow that train the click-through model.
STRATEGIES = ("Async", "Sync", "Hybrid")
#: Layers of the dense model and their width.
LAYERS, WIDTH = 8, 512
#: Largest difference of the losses of a round, as a fraction: of ways with the same updates, and of any two.
SAME, NEAR = 0.01, 0.03

Start = Callable[..., Way]


def main() -> None:
    given = options(
        __doc__, model=("both", "clicks", "dense"), rounds=10, steps=100, turns=1, beside=None, torchrec=None
    )
    if given.model != "dense":
        publish("peers_training_clicks", clicks(given), as_json=given.json)
    if given.model != "clicks":
        publish("peers_training_dense", dense(given), as_json=given.json)


def clicks(given: Any) -> list[dict[str, Any]]:
    """Return the rows of the click-through model; `--turns` is the number of times that every way is started."""
    starts: dict[str, Start] = {f"dflow {each}": partial(clicks_dflow, strategy=each) for each in STRATEGIES}
    if given.beside:
        starts["TensorFlow"] = partial(clicks_tensorflow, python=given.beside)
        starts["PyTorch DDP"] = partial(clicks_torch, python=given.beside)
    if given.torchrec:
        starts["TorchRec"] = partial(clicks_torch, python=given.torchrec, script="torchrec")
    model = ["--rows", str(ROWS), "--batch", str(CLICKS_BATCH)]
    # A first step, a round that is not measured, the others, and a batch that a loop takes ahead.
    model += ["--batches", str(2 + given.steps * (1 + given.rounds))]
    found: dict[str, list[Round]] = {name: [] for name in starts}
    for _ in range(given.turns):
        with contextlib.ExitStack() as stack:
            ways = {name: start(stack, model) for name, start in starts.items()}
            for way in ways.values():
                clicks_round(way, given.steps)
            turn = in_turn({name: partial(clicks_round, way, given.steps) for name, way in ways.items()}, given.rounds)
        refuse_other_curves({name: [each.loss for each in rounds] for name, rounds in turn.items()})
        for name, rounds in turn.items():
            found[name] += rounds
    curves = {name: " ".join(f"{each.loss:.4f}" for each in rounds[: given.rounds]) for name, rounds in found.items()}
    for name, curve in curves.items():
        print(f"{name}: losses over rounds of {WORKERS * given.steps * CLICKS_BATCH} examples: {curve}")
    return lines(found, WORKERS * CLICKS_BATCH)


def clicks_round(way: Way, steps: int) -> Round:
    """Run a round of `steps` batches on each worker, until the slower one has ended."""
    found, processor_s = way.measured(steps)
    return Round(max(each["s"] for each in found) / steps, processor_s, mean(each["loss"] for each in found))


def refuse_other_curves(losses: Mapping[str, Sequence[float]]) -> None:
    """Exit unless the losses of all ways agree in each round as the tolerances say, and fall."""
    for one, other in [(one, other) for one in losses for other in losses if one < other]:
        limit = SAME if is_synchronous(one) == is_synchronous(other) else NEAR
        if not np.allclose(losses[one], losses[other], rtol=limit):
            raise SystemExit(f"losses differ by {limit:.0%} or more: {one} {losses[one]}, {other} {losses[other]}")
    for way, each in losses.items():
        if len(each) > 1 and not each[-1] < each[0]:
            raise SystemExit(f"{way} trains nothing, the losses are {each}")


def is_synchronous(way: str) -> bool:
    """Whether an update averages a gradient of each worker."""
    return way not in ("dflow Async", "TensorFlow")


def clicks_dflow(stack: contextlib.ExitStack, model: list[str], strategy: str) -> Way:
    tasks = stack.enter_context(running_tasks(PS, WORKERS, **ONE_THREAD))
    command = [
        sys.executable,
        "-m",
        "benchmarks._clicks_dflow",
        *model,
        "--workers",
        str(WORKERS),
        "--strategy",
        strategy,
    ]
    trainers = [started(stack, command, tasks.worker(index)) for index in range(WORKERS)]
    return Way(trainers, [*tasks.ps, tasks.coordinator_pid])


def clicks_tensorflow(stack: contextlib.ExitStack, model: list[str], python: str) -> Way:
    tasks, words = stack.enter_context(
        running_peers([python, "-m", "benchmarks._clicks_tensorflow", *model], PS, WORKERS)
    )
    return Way([started(stack, each, standalone()) for each in words], tasks)


def clicks_torch(stack: contextlib.ExitStack, model: list[str], python: str, script: str = "torch") -> Way:
    command = [
        python,
        "-m",
        f"benchmarks._clicks_{script}",
        *model,
        "--workers",
        str(WORKERS),
        "--port",
        str(free_port()),
    ]
    return Way([started(stack, [*command, "--index", str(index)], standalone()) for index in range(WORKERS)])


def dense(given: Any) -> list[dict[str, Any]]:
    """Return the rows of the dense model."""
    starts: dict[str, Start] = {"dflow AllReduce": dense_all_reduce, "dflow Sync": by_dflow, "JAX": dense_jax}
    if given.beside:
        starts["PyTorch DDP"] = by_torch
    model = ["--layers", str(LAYERS), "--width", str(WIDTH)]
    found: dict[str, list[Round]] = {name: [] for name in starts}
    for _ in range(given.turns):
        with contextlib.ExitStack() as stack:
            ways = {name: start(stack, model, WORKERS, given.beside) for name, start in starts.items()}
            for name, rounds in rounds_of(ways, given.rounds, given.steps).items():
                found[name] += rounds
    return lines(found, WORKERS * BATCH)


def dense_all_reduce(stack: contextlib.ExitStack, model: list[str], workers: int, _: Any) -> Way:
    tasks = stack.enter_context(running_tasks(0, workers))
    command = [sys.executable, "-m", "benchmarks._training_dflow", "--all-reduce", *model]
    return Way([started(stack, command, tasks.worker(index)) for index in range(workers)], [tasks.coordinator_pid])


def dense_jax(stack: contextlib.ExitStack, model: list[str], workers: int, _: Any) -> Way:
    command = [sys.executable, "-m", "benchmarks._training_jax", *model, "--workers", str(workers)]
    command += ["--port", str(free_port()), "--index"]
    return Way([started(stack, [*command, str(index)], standalone()) for index in range(workers)])


def lines(found: Mapping[str, Sequence[Round]], examples: int) -> list[dict[str, Any]]:
    """Return a row for each way; `examples` is the number in a step of all workers."""
    times = {way: [each.step_s for each in rounds] for way, rounds in found.items()}
    rows = []
    for way, rounds in found.items():
        row = {"way": way, "examples/s": examples / median(times[way]), "ms": 1e3 * median(times[way])}
        row |= {"cpu ms": 1e3 * mean(each.processor_s for each in rounds), "loss": rounds[-1].loss}
        for other in [name for name in times if name != way]:
            row[f"/ {other}"] = "{:.2f} ({:.2f} to {:.2f})".format(*median_ratio(times[other], times[way]))
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
