"""How many steps of workers does a ps task serve, how much processor time does one cost it, and how much memory?

Each of 4 to 64 workers fetches 4 variables of 64 x 64 float32 from the ps tasks, and sends an update of each, without
waiting for other workers. The ps tasks are processes; the workers live in 2 processes, each as a task with separate
connections. The workers take more of this machine's cores than the ps tasks do, so `steps/s`, of all workers together,
is the rate of the machine. `ps cpu us` is the processor time of all ps tasks per step of a worker, and `steps/ps
core-s` the steps for a second of it. `peak MB` is the highest resident memory of a ps task.

`--beside PYTHON` names an environment with TensorFlow, whose own ps tasks (graph mode, gRPC) then serve as many
workers, a round after each of dflow's. `dflow / way` is the processor time of dflow's ps tasks over those of the way,
round by round. `--ps` and `--workers` measure one number of tasks.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._cluster import running_peers, running_tasks, standalone
from benchmarks._paired import in_turn, median_ratio, options, publish
from benchmarks._trainers import Trainer
from benchmarks.startup import processor_s

PS = (1, 2)
WORKERS = (4, 8, 16, 32, 64)
#: Number of processes that the workers share.
CROWDS = 2


@dataclass(frozen=True)
class Round:
    """Steps of all workers per s; processor time of all ps tasks in s per step; highest memory of a ps task in MB."""

    steps_per_s: float
    ps_s: float
    peak_mb: float


class Crowd:
    """Workers that share `CROWDS` processes, and their ps tasks.

    ps       process ids of the ps tasks
    command  starts the process of the workers whose indices follow it
    count    number of steps of each worker in a round
    """

    def __init__(
        self, stack: contextlib.ExitStack, ps: Sequence[int], command: list[str], workers: int, count: int
    ) -> None:
        self._ps, self._steps = ps, workers * count
        every = [map(str, range(first, workers, CROWDS)) for first in range(CROWDS)]
        commands = [[*command, "--count", str(count), "--indices", *indices] for indices in every]
        self._trainers = [
            stack.enter_context(contextlib.closing(Trainer(command, standalone()))) for command in commands
        ]
        for trainer in self._trainers:
            trainer.measured()

    def round(self) -> Round:
        """Run the steps of all workers concurrently."""
        before = sum(map(processor_s, self._ps))
        for trainer in self._trainers:
            trainer.start_round(1)
        elapsed = max(trainer.measured()["times"][0] for trainer in self._trainers)
        spent = sum(map(processor_s, self._ps)) - before
        return Round(self._steps / elapsed, spent / self._steps, max(map(peak_mb, self._ps)))


def main() -> None:
    given = options(__doc__, ps=0, workers=0, rounds=10, steps=1000, beside=None)
    shards, counts = [given.ps] if given.ps else PS, [given.workers] if given.workers else WORKERS
    rows = [row for ps in shards for workers in counts for row in measured(ps, workers, given)]
    publish("many_workers", rows, as_json=given.json)


def measured(ps: int, workers: int, given: Any) -> list[dict[str, Any]]:
    """Return the rows of a number of tasks. In a round all workers together do at most `given.steps` steps."""
    starts: dict[str, Callable[..., tuple[Sequence[int], list[str]]]] = {"dflow": by_dflow}
    if given.beside:
        starts["TensorFlow"] = by_tensorflow
    count = max(1, given.steps // workers)
    with contextlib.ExitStack() as stack:
        ways = {
            name: Crowd(stack, *start(stack, ps, workers, given.beside), workers, count)
            for name, start in starts.items()
        }
        found = in_turn({name: way.round for name, way in ways.items()}, given.rounds)
    return [{"ps": ps, "workers": workers, "way": name, **line(found["dflow"], found[name])} for name in found]


def line(ours: Sequence[Round], rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of a way, beside dflow's."""
    ps_s = [each.ps_s for each in rounds]
    return {
        "steps/s": statistics.median(each.steps_per_s for each in rounds),
        "ps cpu us": 1e6 * statistics.median(ps_s),
        "steps/ps core-s": 1 / statistics.median(ps_s),
        **dict(zip(("dflow / way", "p10", "p90"), median_ratio([each.ps_s for each in ours], ps_s), strict=True)),
        "peak MB": max(each.peak_mb for each in rounds),
    }


def by_dflow(stack: contextlib.ExitStack, ps: int, workers: int, _: str) -> tuple[Sequence[int], list[str]]:
    """Start ps tasks; return their process ids, and a command that starts workers, without their indices."""
    tasks = stack.enter_context(running_tasks(ps, workers))
    return tasks.ps, [sys.executable, "-m", "benchmarks._crowd_dflow", "--coordinator", tasks.coordinator]


def by_tensorflow(stack: contextlib.ExitStack, ps: int, workers: int, python: str) -> tuple[Sequence[int], list[str]]:
    """As `by_dflow`."""
    command = [python, "-m", "benchmarks._crowd_tensorflow"]
    tasks, (first, *_) = stack.enter_context(running_peers(command, ps, workers))
    return tasks, first


def peak_mb(pid: int) -> float:
    """Return the highest resident memory of a process since its start."""
    status = dict(text.split(":", 1) for text in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()
