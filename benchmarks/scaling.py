"""Estimate step times on large clusters, and compare the simulation with the OSDI 2016 paper.

Simulated: step times by the model of `benchmarks/_cluster_model.py`, with the paper's hardware as parameters, beside
the paper's figures (sections 6.2 and 6.3). *held out* marks figures that no parameter was fitted to. Measured: the
processor time of the coordinator's real state machine, fed with the messages of up to 10,000 tasks. `--json` writes the
figures to benchmarks/results and the plots to docs/images; the plots need matplotlib (the `plots` extra).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._backup_model import log_normal, stragglers
from benchmarks._cluster_model import MB, PAPER, PAPER_INCEPTION, ClusterModel, Shape, Step
from benchmarks._coordinator_load import coordinator_load
from benchmarks._paired import options, publish

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WORKERS = (1, 2, 5, 10, 25, 50, 75, 100)
NULL_STEPS = {
    "scalar": Step(64),
    "dense 100 MB": Step(100 * MB),
    "dense 1 GB": Step(1000 * MB),
    "sparse": Step(32 * 4100, 32 * 4100, is_sparse=True),
}
#: Median ms with 1 and with 100 workers, and whether the second was fitted too.
PAPER_MS = {
    "scalar": (1.8, 8.8, True),
    "dense 100 MB": (147.0, 613.0, False),
    "dense 1 GB": (1010.0, 7160.0, False),
    "sparse": (5.0, 20.0, False),
}
#: Inception-v3: each worker fetches this many bytes of parameters and sends as large a gradient; images per worker.
INCEPTION, BATCH = Step(95 * MB, 95 * MB), 32
TRAINING_WORKERS = (25, 50, 100, 150, 200, 300, 400)
#: From the best normalised speedup, 9.5% at 3, and the shortest step, 1.93 s at 4.
PAPER_BACKUPS = {0: 2.26, 3: 1.95, 4: 1.93}
TASKS = (100, 1000, 10_000)


def main() -> None:
    given = options(__doc__, steps=200)
    null, training = null_rows(given.steps), training_rows(given.steps)
    backups, load = backup_rows(given.steps), load_rows()
    publish("scaling_null_step", null, as_json=given.json)
    publish("scaling_training", training, as_json=given.json)
    publish("scaling_backups", backups, as_json=given.json)
    publish("scaling_backup_models", model_rows(), as_json=given.json)
    publish("scaling_coordinator", load, as_json=given.json)
    if given.json:
        from benchmarks._scaling_plots import draw

        draw(null, training, backups, load, IMAGES)


def null_rows(steps: int) -> list[dict[str, Any]]:
    """The step of section 6.2: 16 ps tasks, in ms."""
    rows = []
    for kind, step in NULL_STEPS.items():
        one_ms, hundred_ms, is_fitted = PAPER_MS[kind]
        for workers in WORKERS:
            times_ms = 1e3 * ClusterModel(PAPER, Shape(workers, 16)).synchronous(step, steps)
            p10, median, p90 = np.percentile(times_ms, [10, 50, 90])
            paper = {1: one_ms, 100: hundred_ms}.get(workers, "")
            held_out = "yes" if workers == 100 and not is_fitted else ""
            row = {"kind": kind, "workers": workers, "median ms": median, "p10": p10, "p90": p90}
            rows.append({**row, "paper ms": paper, "held out": held_out})
    return rows


def training_rows(steps: int) -> list[dict[str, Any]]:
    """Inception-v3 of section 6.3: 17 ps tasks, images a second."""
    rows = []
    for workers in TRAINING_WORKERS:
        cluster = ClusterModel(PAPER, Shape(workers, 17), PAPER_INCEPTION)
        together, alone = cluster.synchronous(INCEPTION, steps), cluster.asynchronous(INCEPTION, max(10, steps // 10))
        synchronous = workers * BATCH / float(np.median(together))
        asynchronous = workers * BATCH / float(np.median(alone))
        paper = 2300 if workers == 200 else ""
        rows.append({"workers": workers, "sync images/s": synchronous, "async images/s": asynchronous, "paper": paper})
    return rows


def backup_rows(steps: int) -> list[dict[str, Any]]:
    """Take the first 50 gradients of 50 workers and some backups: step in s, and speedup per worker used.

    By the simulation, and by two explicit models (`benchmarks/_backup_model.py`).
    """
    models = {"log-normal": log_normal(), "stragglers": stragglers()}
    steps_s: dict[str, list[float]] = {"": []}
    for backups in range(6):
        shape = Shape(50 + backups, 17, backups=backups)
        times = ClusterModel(PAPER, shape, PAPER_INCEPTION).synchronous(INCEPTION, 4 * steps)
        steps_s[""].append(float(np.median(times)))
        for name, model in models.items():
            steps_s.setdefault(f"{name}: ", []).append(model.step_s(50, backups))
    rows = []
    for backups in range(6):
        row: dict[str, Any] = {"backups": backups, "paper s": PAPER_BACKUPS.get(backups, "")}
        for name, found_s in steps_s.items():
            row[f"{name}step s"] = found_s[backups]
            row[f"{name}normalised"] = found_s[0] / found_s[backups] * 50 / (50 + backups)
        rows.append(row)
    return rows


def model_rows() -> list[dict[str, Any]]:
    """The parameters of the explicit models, and their steps for 25 workers, held out, and for 200, in s."""
    return [
        {**asdict(model), "25 workers": model.step_s(25), "200 workers": model.step_s(200)}
        for model in (log_normal(), stragglers(), stragglers(0.01))
    ]


def load_rows() -> list[dict[str, Any]]:
    """Measure the coordinator's load from N tasks, with steps of 100 ms and a heartbeat each second."""
    rows = []
    for tasks in TASKS:
        load = coordinator_load(tasks - 16, 16, 0.1)
        rows.append(
            {
                "tasks": load.tasks,
                "messages/s": load.steady.messages,
                "MB/s": load.steady.size_bytes / MB,
                "part of a core": load.steady.processor_s,
                "a join, messages": load.join.messages,
                "a join, MB": load.join.size_bytes / MB,
                "a join, ms": 1e3 * load.join.processor_s,
            }
        )
    return rows


if __name__ == "__main__":
    main()
