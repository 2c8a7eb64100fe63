"""Settings of an accumulator: whether it gives the mean of its gradients or their sum, and of how many."""

from __future__ import annotations

from enum import Enum

import msgspec


class Reduction(Enum):
    """The result that a take makes of the gradients."""

    MEAN = "mean"
    SUM = "sum"


class AccumulatorSettings(msgspec.Struct, frozen=True, tag="accumulator"):
    """Settings of an accumulator, whose results depend on nothing but these and its ops.

    `limit`  largest number of gradients in a take; later ones are dropped. None for any number
    """

    reduction: Reduction
    limit: int | None = None
