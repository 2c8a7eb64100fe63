"""How many steps of workers does a ps task serve, how much processor time does one cost it, and how much memory?

Each of 4 to 64 workers fetches 4 variables of 64 x 64 float32 from the ps tasks, and sends an update of each, without
waiting for other workers. The ps tasks are processes; the workers live in a few processes, each with connections of its
own. They share this machine's cores with the ps tasks, and need more of them than those: so `steps/s` is that of the
whole machine. `ps cpu us` is the processor time of all ps tasks per step of a worker, and `steps/ps core-s` the steps
for a second of it. `peak MB` is the highest resident memory of a ps task.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._cluster import running_tasks, standalone
from benchmarks._paired import in_turn, options, publish
from benchmarks._trainers import Trainer
from benchmarks.startup import processor_s

PS = (1, 2)
WORKERS = (4, 8, 16, 32, 64)
#: Processes that the workers share.
CROWDS = 2


@dataclass(frozen=True)
class Round:
    """Steps of all workers per s; processor times in s of the ps tasks and of the coordinator, per step; memory."""

    steps_per_s: float
    ps_s: float
    coordinator_s: float
    peak_mb: float


def main() -> None:
    given = options(__doc__, rounds=5, steps=2000, turns=2)
    ways = {(ps, workers): lambda ps=ps, workers=workers: run(ps, workers, given) for ps in PS for workers in WORKERS}
    found = in_turn({f"{ps} {workers}": way for (ps, workers), way in ways.items()}, given.turns)
    rows = [line(ps, workers, [each for turn in found[f"{ps} {workers}"] for each in turn]) for ps, workers in ways]
    publish("many_workers", rows, as_json=given.json)


def line(ps: int, workers: int, rounds: list[Round]) -> dict[str, Any]:
    """Return the row of a cluster."""
    rates, ps_us = sorted(each.steps_per_s for each in rounds), sorted(1e6 * each.ps_s for each in rounds)
    tenth = len(rounds) // 10
    return {
        "ps": ps,
        "workers": workers,
        "steps/s": statistics.median(rates),
        "p10": rates[tenth],
        "p90": rates[-1 - tenth],
        "ps cpu us": statistics.median(ps_us),
        "p10 ": ps_us[tenth],
        "p90 ": ps_us[-1 - tenth],
        "steps/ps core-s": 1e6 / statistics.median(ps_us),
        "coordinator cpu us": 1e6 * statistics.mean(each.coordinator_s for each in rounds),
        "peak MB": max(each.peak_mb for each in rounds),
    }


def run(ps: int, workers: int, given: Any) -> list[Round]:
    """Start a cluster and measure its rounds, each of at most `given.steps` steps of all workers together."""
    each = max(1, given.steps // workers)
    steps = workers * each
    with contextlib.ExitStack() as stack:
        tasks = stack.enter_context(running_tasks(ps, workers))
        command = [sys.executable, "-m", "benchmarks._crowd", "--coordinator", tasks.coordinator, "--steps", str(each)]
        indices = [[str(index) for index in range(first, workers, CROWDS)] for first in range(CROWDS)]
        crowds = [
            stack.enter_context(contextlib.closing(Trainer([*command, "--indices", *mine], standalone())))
            for mine in indices
        ]
        for crowd in crowds:
            crowd.measured()

        def processor() -> tuple[float, float]:
            return sum(map(processor_s, tasks.ps)), processor_s(tasks.coordinator_pid)

        rounds = []
        for _ in range(given.rounds):
            ps_s, coordinator_s = processor()
            for crowd in crowds:
                crowd.start_round(1)
            elapsed = max(crowd.measured()["times"][0] for crowd in crowds)
            ps_after, coordinator_after = processor()
            spent = (ps_after - ps_s) / steps, (coordinator_after - coordinator_s) / steps
            rounds.append(Round(steps / elapsed, *spent, max(map(peak_mb, tasks.ps))))
        return rounds


def peak_mb(pid: int) -> float:
    """Return the highest resident memory of a process so far."""
    status = dict(text.split(":", 1) for text in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()
