"""Fixed costs, so that choices do not depend on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflow.lowering.placement.graph_problem import Price
from dflow.lowering.placement.measure import Meter
from dflow.lowering.placement.problem import DeviceLink, Machine
from dflow.lowering.placement.work import Rates, work_in
from dflow.tracing.ir.graph import Graph

RATES, LINK = Rates(1e9, 1e10, 1e-5), DeviceLink(2e-5, 1e9)


@dataclass(frozen=True)
class GivenCosts(Meter):
    """Equal devices with these rates and separate processors; a unit costs the estimate of its nodes."""

    limits: tuple[int | None, ...] = ()

    def machine(self, names: Sequence[str]) -> Machine:
        count = len(names)
        return Machine(
            tuple(names),
            tuple((LINK,) * count for _ in names),
            (RATES.launch_s,) * count,
            self.limits or (None,) * count,
            tuple(range(count)),
            ((),) * count,
        )

    def rates(self, name: str) -> Rates:
        return RATES

    def prices(self, parts: Sequence[Graph], names: Sequence[str], budget_s: float) -> list[Price]:
        return [Price((RATES.seconds(work_in(part.nodes)),) * len(names)) for part in parts]
