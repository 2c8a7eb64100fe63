"""Estimate the step times of a cluster of any size, and its coordinator's load.

The step times are a model's (`benchmarks/_cluster_model.py`), by default with the hardware of the OSDI 2016 paper; the
coordinator's processor time is measured on this machine. The same options give the same step times.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks._cluster_model import MB, PAPER, ClusterModel, Computing, Shape, Step
from benchmarks._coordinator_load import Load, coordinator_load
from dflow.cli.command import at_least_one, count

#: Bytes sent for a scalar, and for 32 rows of 1,024 float32 with their indices.
SCALAR_BYTES, ROWS_BYTES = 4.0, 32 * 4100.0
#: Most and fewest steps simulated by default: enough for stable percentiles; steps of many workers need fewer.
MOST_STEPS, FEWEST_STEPS = 200, 20


def main(words: Sequence[str] | None = None) -> None:
    arguments = parser()
    options = arguments.parse_args(words)
    if options.backups >= options.workers:
        arguments.error(f"{options.backups} of {options.workers} workers are backups; give fewer with --backups")
    shape = Shape(options.workers, options.ps, not options.asynchronous, options.backups)
    step = {
        "scalar": Step(SCALAR_BYTES * options.ps),
        "dense": Step(options.mb * MB),
        "sparse": Step(ROWS_BYTES, ROWS_BYTES, is_sparse=True),
        "train": Step(options.mb * MB, options.mb * MB),
    }[options.step]
    computing = Computing(0.0)
    if options.step == "train":
        computing = Computing(options.compute_ms / 1e3, 0.05, options.slow, options.slow_by, options.hidden)
    steps = options.steps or max(FEWEST_STEPS, min(MOST_STEPS, 2_000_000 // (shape.workers * shape.ps)))
    hardware = replace(
        PAPER,
        link_bytes_per_s=options.link_gbit * 1e9 / 8,
        hop_s=options.hop_us / 1e6,
        message_s=options.message_us / 1e6,
    )
    cluster = ClusterModel(hardware, shape, computing, options.seed)
    times = cluster.synchronous(step, steps) if shape.is_synchronous else cluster.asynchronous(step, steps)
    p10_s, median_s, p90_s = (float(found) for found in np.percentile(times, [10, 50, 90]))
    mean_s = float(np.mean(times))
    moved_bytes = shape.workers * (step.fetch_bytes + step.update_bytes) / shape.ps
    load = coordinator_load(shape.workers, shape.ps, median_s)
    print(f"{options.step} step, {shape.workers} workers, {shape.ps} ps tasks")
    print(f"  step       {_ms(median_s)} (p10 {_ms(p10_s)}, p90 {_ms(p90_s)})")
    # A synchronous step drops the work of as many workers as there are backups.
    print(f"  workers    {(shape.workers - shape.backups) / mean_s:,.1f} steps/s in all")
    print(f"  each ps    {moved_bytes / mean_s / MB:,.1f} MB/s")
    print(f"coordinator of {load.tasks} tasks, measured on this machine")
    print(f"  a second   {_load(load.steady)}")
    print(f"  a join     {_load(load.join)}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser("python -m benchmarks.cluster_size", description=__doc__)
    made.add_argument(
        "--step",
        choices=("scalar", "dense", "sparse", "train"),
        default="train",
        help="fetch a number from each ps, the whole model, or 32 rows of a table; or fetch the model, compute and "
        "send as large an update (default: train)",
    )
    made.add_argument("--workers", type=at_least_one, default=50, metavar="N", help="workers (default: 50)")
    made.add_argument("--ps", type=at_least_one, default=16, metavar="N", help="ps tasks (default: 16)")
    made.add_argument("--steps", type=at_least_one, metavar="N", help="steps (default: enough for stable figures)")
    made.add_argument("--seed", type=count, default=0, metavar="N", help="seed of the times (default: 0)")
    made.add_argument("--mb", type=_positive, default=100.0, metavar="MB", help="size of the model (default: 100)")
    made.add_argument("--asynchronous", action="store_true", help="no worker waits for another")
    made.add_argument("--backups", type=count, default=0, metavar="B", help="workers not waited for (default: 0)")
    for name, default, text in (
        ("--link-gbit", PAPER.link_bytes_per_s * 8 / 1e9, "bandwidth of each task's network card"),
        ("--hop-us", PAPER.hop_s * 1e6, "latency from task to task"),
        ("--message-us", PAPER.message_s * 1e6, "processor time of a ps task for each message"),
        ("--compute-ms", 1000.0, "computing time of a step, with train"),
        ("--slow-by", 0.3, "mean extra time of a slow step, as a fraction of its time"),
    ):
        made.add_argument(name, type=_positive, default=default, metavar="X", help=f"{text} (default: {default:.3g})")
    for name, text in (
        ("--slow", "fraction of steps that are slow"),
        ("--hidden", "fraction of transfer time that overlaps with computing"),
    ):
        made.add_argument(name, type=_part, default=0.0, metavar="X", help=f"{text} (default: 0)")
    return made


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def _part(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and less than 1")
    return value


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _load(load: Load) -> str:
    return f"{load.messages:,.0f} messages, {load.size_bytes / MB:,.2f} MB, {load.processor_s * 1e3:,.1f} ms of a core"


if __name__ == "__main__":
    main()
