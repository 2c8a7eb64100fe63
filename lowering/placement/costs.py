"""The time of work on a device, by its rates: that of its arithmetic or of its bytes, whichever is longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflow.lowering.placement.work import Work


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of a device: operations and bytes per second, and the time to start a program, in s."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float

    def seconds(self, work: Work) -> float:
        """Return the time of the work, without the launch."""
        return max(work.flops / self.flops_per_s, work.moved_bytes / self.bytes_per_s)


def analysed(compiled: Any) -> Work | None:
    """Return the work of a compiled program by XLA's cost analysis; None on a platform without one."""
    found = compiled.cost_analysis()
    if not found:
        return None
    return Work(max(0.0, found.get("flops", 0.0)), max(0.0, found.get("bytes accessed", 0.0)))
