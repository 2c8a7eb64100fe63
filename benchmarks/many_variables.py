"""What does a training step of many small variables cost on a cluster, beside one process and a cluster made by hand?

The dense model has N layers of 64 x 64 float32 with ReLU, and a batch of 32; `--model transformer` has 12 layers of 12
variables. A step is the forward and backward pass and Adam's update of every variable. *cluster* is dflow with 2 ps
tasks and a worker, *one process* the same script without a cluster. *by hand* are three processes with Unix sockets and
one jitted function each, whose worker sends the gradients in one message to each other process and receives the new
values in one. `--beside PYTHON` names an environment with TensorFlow, whose own runtime (graph mode, gRPC) then does
the step of the dense model on a cluster of as many processes.

All ways live at the same time and alternate, a round of steps each; the idle ones wait for their input. All must have
the same losses. `first s` is the time from the end of the worker's imports to the end of its first step, while no other
way computes. `cpu ms` is the processor time of all processes of a way, per step. `dflow / way` is the cluster's step
over that of the way, round by round, with its 10th and 90th percentile.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks._cluster import running_peers, running_tasks, standalone
from benchmarks._paired import options, publish
from benchmarks._trainers import Trainer, Way, lines, rounds_of

#: Layers of the models, by name.
SIZES = {"dense": (10, 50, 200, 1000), "transformer": (12,)}
PS = 2
WIDTH = 64
MODULE = "benchmarks._training_"


def main() -> None:
    words = {"model": tuple(SIZES), "sizes": None, "beside": None}
    given = options(__doc__, **words, rounds=15, steps=10, turns=3)
    sizes = map(int, given.sizes.split(",")) if given.sizes else SIZES[given.model]
    name = "many_variables" if given.model == "dense" else f"many_variables_{given.model}"
    rows = [row for layers in sizes for row in measured(layers, given)]
    publish(name, rows, as_json=given.json)


def measured(layers: int, given: Any) -> list[dict[str, Any]]:
    """Return the rows of a model. Every way is started again for each of `--turns`."""
    starts: dict[str, Callable[..., Way]] = {"cluster": on_cluster, "one process": alone, "by hand": by_hand}
    if given.beside and given.model == "dense":
        starts["TensorFlow"] = by_tensorflow
    found: dict[str, list[Any]] = {name: [] for name in starts}
    first: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(given.turns):
        with contextlib.ExitStack() as stack:
            ways = {name: start(stack, layers, given) for name, start in starts.items()}
            for name, rounds in rounds_of(ways, given.rounds, given.steps).items():
                found[name] += rounds
                first[name].append(ways[name].first_s)
    every = lines(found)
    for name in first.keys() - {"by hand"}:  # whose worker also starts the other processes
        every[name]["first s"] = statistics.median(first[name])
    return [{"model": given.model, "layers": layers, **every[name]} for name in starts]


def model(layers: int, given: Any) -> list[str]:
    return ["--model", given.model, "--layers", str(layers), "--width", str(WIDTH)]


def on_cluster(stack: contextlib.ExitStack, layers: int, given: Any) -> Way:
    tasks = stack.enter_context(running_tasks(PS, 1))
    trainer = Trainer([sys.executable, "-m", f"{MODULE}dflow", *model(layers, given)], tasks.worker(0))
    return Way([stack.enter_context(contextlib.closing(trainer))], [*tasks.ps, tasks.coordinator_pid])


def alone(stack: contextlib.ExitStack, layers: int, given: Any, script: str = "dflow") -> Way:
    trainer = Trainer([sys.executable, "-m", MODULE + script, *model(layers, given)], standalone())
    return Way([stack.enter_context(contextlib.closing(trainer))])


def by_hand(stack: contextlib.ExitStack, layers: int, given: Any) -> Way:
    return alone(stack, layers, given, "by_hand")


def by_tensorflow(stack: contextlib.ExitStack, layers: int, given: Any) -> Way:
    command = [given.beside, "-m", f"{MODULE}tensorflow", "--layers", str(layers), "--width", str(WIDTH)]
    tasks, workers = stack.enter_context(running_peers(command, PS, 1))
    return Way([stack.enter_context(contextlib.closing(Trainer(words, standalone()))) for words in workers], tasks)


if __name__ == "__main__":
    main()
