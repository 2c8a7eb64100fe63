"""How long is a synchronous step with 0 to 5 backup workers, and how long does each strategy take to a given loss?

Section 6.3 of the OSDI 2016 paper, at small size: each step averages the gradients of 8 workers, and `backups` more
workers compete to be among them. Computing a gradient takes 0.2 s; one in ten is a straggler's, which takes twice as
long (`--slow`, `--by`). The times are waits, since all processes share the cores of one machine, and the rest of a step
is dflow's. `normalised` is t(0) / t(b) x 8 / (8 + b), the paper's speedup for each worker used. `to loss s` is the time
until the loss on all data, which worker 0 computes after each of its steps, is below 0.5: the paper measured the speed
of steps alone. `async` lets each of 8 workers apply its gradient without waiting. In one process, of the learning rates
0.5, 1, 2, 4 and 8, the averages of 8 gradients come to that loss soonest with 4, and single ones with 2.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np

from benchmarks._launched import figures_in, launched
from benchmarks._paired import in_turn, options, publish

BACKUPS = range(6)
WORKERS = 8
RUN_S = 600


def main() -> None:
    given = options(__doc__, steps=60, rounds=3, workers=WORKERS, compute="0.2", slow="0.1", by="1.0", target="0.5")
    ways = {f"sync, {backups} backups": partial(run, "sync", backups, given) for backups in BACKUPS}
    ways["async"] = partial(run, "async", 0, given)
    found = in_turn(ways, given.rounds)
    first = statistics.median(one["step"] for one in found["sync, 0 backups"])
    rows = []
    for name, runs in found.items():
        step = statistics.median(one["step"] for one in runs)
        row: dict[str, Any] = {
            "way": name,
            "mean step ms": 1e3 * step,
            "p90 ms": 1e3 * statistics.median(one["p90"] for one in runs),
        }
        if name.startswith("sync"):
            workers = given.workers + int(name.split()[1])
            row["normalised"] = first / step * given.workers / workers
        reached = [one["reached"] for one in runs if one["reached"] is not None]
        row["to loss s"] = statistics.median(reached) if len(reached) == len(runs) else "not reached"
        rows.append(row)
    publish("replicas", rows, as_json=given.json)


def run(strategy: str, backups: int, given: Any) -> dict[str, Any]:
    """Train once; return the mean step in s, its 90th percentile, and the time to the loss."""
    words = ["--strategy", strategy, "--backups", str(backups)]
    # An asynchronous step is one worker's, a synchronous one of all.
    steps = given.steps * given.workers if strategy == "async" else given.steps
    words += ["--steps", str(steps), "--compute", given.compute, "--slow", given.slow, "--slow-by", given.by]
    words += ["--target", given.target, "--rate", "2" if strategy == "async" else "4"]
    ended = launched("_replicas_worker.py", words, ps=1, workers=given.workers + backups, timeout_s=RUN_S)
    figures = figures_in(ended.stdout + ended.stderr)
    steps_s = np.diff(figures["times"])
    p90 = float(np.percentile(steps_s, 90))
    return {"step": float(np.mean(steps_s)), "p90": p90, "reached": figures["reached"]}


if __name__ == "__main__":
    main()
