"""What work takes on a device, by its rates: as long as its arithmetic, or its bytes, whichever is longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflow.lowering.placement.work import Work


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device is: operations and bytes in a second, and what it takes to start a program, in s."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float

    def seconds(self, work: Work) -> float:
        """How long the work takes, without the launch."""
        return max(work.flops / self.flops_per_s, work.moved_bytes / self.bytes_per_s)


def analysed(compiled: Any) -> Work | None:
    """What XLA says of a program that it compiled; None on a platform where it says nothing."""
    found = compiled.cost_analysis()
    if not found:
        return None
    return Work(max(0.0, found.get("flops", 0.0)), max(0.0, found.get("bytes accessed", 0.0)))
