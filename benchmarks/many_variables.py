"""What does a training step of many small variables cost on a cluster, beside one process and a cluster made by hand?

The model has N layers of 64 x 64 float32 with ReLU, and a batch of 32; a step is the forward and backward pass and
Adam's update of every variable. *cluster* is dflow with 2 ps tasks and a worker, *one process* the same script without
a cluster. *by hand* are three processes with Unix sockets and one jitted function each, whose worker sends the
gradients in one message to each other process and receives the new values in one.

All ways live at the same time and take turns, a round of steps each; a way that has no turn waits for its input.
`first s` is the time from the end of the worker's imports to the end of its first step, while no other way computes.
All ways must have the same losses.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._paired import in_turn, median_ratio, options, publish
from benchmarks._rounds import Trainer
from benchmarks.startup import free_port, running

SIZES = (10, 50, 200, 1000)
PS = 2


def main() -> None:
    given = options(__doc__, sizes=",".join(map(str, SIZES)), rounds=15, steps=10, turns=1)
    rows = [measured(int(size), given) for size in given.sizes.split(",")]
    publish("many_variables", rows, as_json=given.json)


def measured(size: int, given: Any) -> dict[str, Any]:
    """Return the row of a model of `size` variables."""
    module = "benchmarks._many_variables_"
    times: dict[str, list[float]] = {}
    firsts: dict[str, list[float]] = {}
    for _ in range(given.turns):
        with contextlib.ExitStack() as stack:
            trainers = {}
            for way, script, tasks in (
                ("cluster", "dflow", cluster()),
                ("one process", "dflow", standalone()),
                ("by hand", "by_hand", standalone()),
            ):
                environment = stack.enter_context(tasks)
                trainer = Trainer([sys.executable, "-m", module + script, str(size)], environment)
                trainers[way] = stack.enter_context(contextlib.closing(trainer))
                firsts.setdefault(way, []).append(trainer.first()[0])
            for way, medians in rounds_of(trainers, given).items():
                times.setdefault(way, []).extend(medians)
    row: dict[str, Any] = {"variables": size}
    row |= {f"{way} ms": 1e3 * statistics.median(medians) for way, medians in times.items()}
    for way in [way for way in times if way != "cluster"]:
        ratio, low, high = median_ratio(times["cluster"], times[way])
        row |= {f"/ {way}": ratio, f"p10, p90 / {way}": f"{low:.3g}, {high:.3g}"}
    return row | {f"first s, {way}": statistics.median(firsts[way]) for way in ("cluster", "one process")}


def rounds_of(trainers: Mapping[str, Trainer], given: Any) -> dict[str, list[float]]:
    """Return the median step of each round, after one round that is not measured. Check that the losses agree."""
    for trainer in trainers.values():
        trainer.round(given.steps)
    found = in_turn({way: lambda way=way: trainers[way].round(given.steps) for way in trainers}, given.rounds)
    for rounds in zip(*found.values(), strict=True):
        losses = [each.loss for each in rounds]
        if not max(losses) - min(losses) <= 0.01 * max(losses):
            raise SystemExit(f"the ways train differently: losses {dict(zip(found, losses, strict=True))}")
    return {way: [statistics.median(each.times) for each in rounds] for way, rounds in found.items()}


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start a coordinator and ps tasks; yield the environment of their worker."""
    coordinator = f"127.0.0.1:{free_port()}"
    tasks = [["task", "--job", "ps", "--index", str(index), "--coordinator", coordinator] for index in range(PS)]
    jobs = ["--job", f"ps={PS}", "--job", "worker=1"]
    with contextlib.ExitStack() as stack, standalone() as environment:
        for words in (["coordinator", *jobs, "--address", coordinator], *tasks):
            stack.enter_context(running([sys.executable, "-m", "dflow", *words]))
        yield environment | {"DFLOW_COORDINATOR": coordinator, "DFLOW_JOB": "worker", "DFLOW_INDEX": "0"}


@contextlib.contextmanager
def standalone() -> Iterator[dict[str, str]]:
    """Yield an environment without a cluster."""
    yield {name: value for name, value in os.environ.items() if not name.startswith("DFLOW_")}


if __name__ == "__main__":
    main()
