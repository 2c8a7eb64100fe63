"""What an accumulator gives: the mean of its gradients, or their sum."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """What becomes of the gradients that are there."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class AccumulatorSettings:
    """Equal settings and equal ops make equal accumulators.

    `limit`  how many gradients one take gives at most: others come too late; None for any number
    """

    reduction: Reduction
    limit: int | None = None
