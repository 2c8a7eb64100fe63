"""What an accumulator gives: the mean of its gradients, or their sum."""

from __future__ import annotations

from enum import Enum

import msgspec


class Reduction(Enum):
    """What becomes of the gradients that are there."""

    MEAN = "mean"
    SUM = "sum"


class AccumulatorSettings(msgspec.Struct, frozen=True, tag="accumulator"):
    """Equal settings and equal ops make equal accumulators.

    `limit`  how many gradients one take gives at most: others come too late; None for any number
    """

    reduction: Reduction
    limit: int | None = None
