"""The figures of one simulated cluster: step time, throughput, network traffic, and the coordinator's load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflow.distributed.simulation.at_size.coordinator_load import CoordinatorLoad, coordinator_load
from dflow.distributed.simulation.at_size.hardware import Computing, Hardware
from dflow.distributed.simulation.at_size.step_times import ClusterModel, Shape, Step

#: Most and fewest steps simulated by default: enough for stable percentiles; steps of many workers need fewer.
_STEPS, _FEWEST = 200, 20


@dataclass(frozen=True)
class SizeReport:
    """Step times in s. `steps_per_s` sums over workers; `ps_bytes_per_s` is one ps task's traffic, both ways."""

    p10_s: float
    median_s: float
    p90_s: float
    steps_per_s: float
    ps_bytes_per_s: float
    coordinator: CoordinatorLoad


def report(
    hardware: Hardware, shape: Shape, step: Step, computing: Computing, steps: int | None = None, seed: int = 0
) -> SizeReport:
    """Simulate `steps` steps, by default enough for stable figures; the same seed gives the same times."""
    count = steps or max(_FEWEST, min(_STEPS, 2_000_000 // (shape.workers * shape.ps)))
    cluster = ClusterModel(hardware, shape, computing, seed)
    times = cluster.synchronous(step, count) if shape.is_synchronous else cluster.asynchronous(step, count)
    p10_s, median_s, p90_s = (float(found) for found in np.percentile(times, [10, 50, 90]))
    # A synchronous step drops the work of as many workers as there are backups.
    steps_per_s = (shape.workers - shape.backups) / float(np.mean(times))
    moved = shape.workers * (step.fetch_bytes + step.update_bytes) / shape.ps
    load = coordinator_load(shape.workers, shape.ps, median_s)
    return SizeReport(p10_s, median_s, p90_s, steps_per_s, moved / float(np.mean(times)), load)
