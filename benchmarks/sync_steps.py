"""How long is a synchronous training step of several workers, beside other runtimes that average gradients?

The models have 2, 25 and 100 MB in layers of N x N float32, a batch of 32 on each worker, and Adam. *dflow* is
`dflow.distributed.Sync` with 2 ps tasks, *one process* the same step without a cluster. `--beside PYTHON` names an
environment with PyTorch and TensorFlow: *PyTorch* is DistributedDataParallel over gloo, which has no ps tasks;
*TensorFlow* is `SyncReplicasOptimizer` with 2 ps tasks and gRPC. Each process computes in one thread.

All ways live at the same time and alternate, a round of steps each; the idle ones wait for their input. All workers
have the same batch, so that all ways must have the same losses. `cpu ms` is the processor time of all processes of a
way, per step. `dflow / way` is dflow's step over that of the way, round by round, with its 10th and 90th percentile.
`--mb` measures one model, `--workers` one number of workers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from benchmarks._cluster import ONE_THREAD, running_peers, running_tasks, standalone
from benchmarks._paired import options, publish
from benchmarks._trainers import Trainer, Way, lines, rounds_of
from benchmarks.startup import free_port

#: Layers and their width, by the model's size in MB.
MODELS = {2: (8, 256), 25: (6, 1024), 100: (6, 2048)}
WORKERS = (1, 2, 4)
PS = 2


def main() -> None:
    given = options(__doc__, mb=0, workers=0, rounds=10, steps=10, beside=None)
    sizes, counts = [given.mb] if given.mb else MODELS, [given.workers] if given.workers else WORKERS
    rows = [row for mb in sizes for workers in counts for row in measured(mb, workers, given)]
    publish("sync_steps", rows, as_json=given.json)


def measured(mb: int, workers: int, given: Any) -> list[dict[str, Any]]:
    """Return the rows of a model and a number of workers."""
    layers, width = MODELS[mb]
    model = ["--layers", str(layers), "--width", str(width)]
    starts: dict[str, Callable[..., Way]] = {"dflow": by_dflow, "one process": alone}
    if given.beside:
        starts |= {"PyTorch": by_torch, "TensorFlow": by_tensorflow}
    with contextlib.ExitStack() as stack:
        ways = {name: start(stack, model, workers, given.beside) for name, start in starts.items()}
        found = lines(rounds_of(ways, given.rounds, given.steps))
    return [{"MB": mb, "workers": workers, **line} for line in found.values()]


def by_dflow(stack: contextlib.ExitStack, model: list[str], workers: int, _: str) -> Way:
    tasks = stack.enter_context(running_tasks(PS, workers, **ONE_THREAD))
    command = [sys.executable, "-m", "benchmarks._training_dflow", "--synchronous", *model]
    trainers = [started(stack, command, tasks.worker(index)) for index in range(workers)]
    return Way(trainers, [*tasks.ps, tasks.coordinator_pid])


def alone(stack: contextlib.ExitStack, model: list[str], *_: Any) -> Way:
    return Way([started(stack, [sys.executable, "-m", "benchmarks._training_dflow", *model], standalone())])


def by_torch(stack: contextlib.ExitStack, model: list[str], workers: int, python: str) -> Way:
    command = [python, "-m", "benchmarks._training_torch", *model, "--workers", str(workers), "--port"]
    command += [str(free_port()), "--index"]
    return Way([started(stack, [*command, str(index)], standalone()) for index in range(workers)])


def by_tensorflow(stack: contextlib.ExitStack, model: list[str], workers: int, python: str) -> Way:
    command = [python, "-m", "benchmarks._training_tensorflow", *model, "--threads", "1", "--synchronous"]
    tasks, words = stack.enter_context(running_peers(command, PS, workers))
    return Way([started(stack, each, standalone()) for each in words], tasks)


def started(stack: contextlib.ExitStack, command: list[str], environment: dict[str, str]) -> Trainer:
    """Start a training process with one computing thread, which ends with `stack`."""
    return stack.enter_context(contextlib.closing(Trainer(command, environment | ONE_THREAD)))


if __name__ == "__main__":
    main()
