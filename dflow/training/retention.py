"""Which checkpoints of a folder stay: the newest, the best, one per period for good, and the newest without a NaN.

Invariants: the newest checkpoint stays; and deleting after each save leaves the same checkpoints as one deletion after
all saves would. The decisions are pure functions of steps, times of the runs and metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from dflow.tracing.errors import CheckpointError
from dflow.training.metric_direction import mode_of


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of a `CheckpointManager`'s folder.

    path        its folder, for `dflow.restore`; a str if it is a URL
    time_s      Unix time of its values, for people: a clock may be set; NaN for one that `dflow.save` wrote to a URL
    metrics     the metrics given with it
    ran_s       time that the runs of its folder took until then, in s
    is_managed  whether a manager wrote it; only such a checkpoint may be deleted
    extra       the further numbers given with it
    is_finite   whether all losses of its run were finite until then, as `save` was given it
    """

    step: int
    path: Path | str
    time_s: float
    metrics: Mapping[str, float]
    ran_s: float = 0.0
    is_managed: bool = True
    extra: Mapping[str, float] = field(default_factory=dict)
    is_finite: bool = True


@dataclass(frozen=True)
class Best:
    """The `count` checkpoints whose `metric` is smallest, or largest if `is_max`."""

    metric: str
    count: int
    is_max: bool

    @staticmethod
    def parsed(given: Any) -> Best | None:
        """Return the rule for `best=` of a manager. Raises CheckpointError for another form."""
        match given:
            case None:
                return None
            case (str(metric), int(count), "min" | "max" as extreme) if count >= 1:
                return Best(metric, count, extreme == "max")
            case (str(metric), int(count)) if count >= 1 and (mode := mode_of(metric)) is not None:
                return Best(metric, count, mode == "max")
            case _:
                raise CheckpointError(
                    f"best: expected (metric, count, 'min' or 'max'), got {given!r}",
                    "give it like best=('loss', 3, 'min'), with a count of at least 1",
                )

    def of(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the best ones, the best first; of equal ones the newer is better. NaN is worse than any number."""
        rated = [one for one in checkpoints if not math.isnan(one.metrics.get(self.metric, math.nan))]
        sign = -1 if self.is_max else 1
        return sorted(rated, key=lambda one: (sign * one.metrics[self.metric], -one.step))[: self.count]


def deleted(
    checkpoints: Sequence[Checkpoint], keep: int, best: Best | None, period: timedelta | None
) -> list[Checkpoint]:
    """Return the managed checkpoints that no rule retains, oldest first. Others do not count.

    The rules are the newest `keep`, the newest with finite losses, the best, and for good the first of each `period`.
    Each rule retains its own.
    """
    ordered = sorted((one for one in checkpoints if one.is_managed), key=lambda one: one.step)
    retained = {one.step for one in ordered[-keep:]}
    retained.update(one.step for one in [one for one in ordered if one.is_finite][-1:])
    retained.update(one.step for one in (best.of(ordered) if best else ()))
    due_s = -math.inf
    for one in ordered:
        if period is not None and one.ran_s >= due_s:
            retained.add(one.step)
            due_s = one.ran_s + period.total_seconds()
    return [one for one in ordered if one.step not in retained]
