"""An evaluation of a `Trainer` that is more than means over batches, such as the end of an epoch of Keras."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OwnEvaluation:
    """A function of the number of steps done that returns metrics. All workers call it; one result is that of all."""

    metrics: Callable[[int], Mapping[str, float]]
