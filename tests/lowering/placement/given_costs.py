"""Fixed costs, so that choices do not depend on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflow.lowering.placement.costs import Rates
from dflow.lowering.placement.instance import Price
from dflow.lowering.placement.problem import DeviceLink, Machine
from dflow.lowering.placement.work import Work, work_of
from dflow.tracing.ir.graph import Graph, Node

RATES, LINK = Rates(1e9, 1e10, 1e-5), DeviceLink(2e-5, 1e9)


@dataclass(frozen=True)
class GivenCosts:
    """Equal devices with these rates and separate processors; a unit costs the estimate of its nodes."""

    rates: Rates = RATES
    link: DeviceLink = LINK
    limits: tuple[int | None, ...] = ()

    def machine(self, names: Sequence[str]) -> Machine:
        count = len(names)
        return Machine(
            tuple(names),
            tuple((self.link,) * count for _ in names),
            (self.rates.launch_s,) * count,
            self.limits or (None,) * count,
            tuple(range(count)),
            ((),) * count,
        )

    def estimate(self, node: Node, name: str) -> float:
        return self.rates.seconds(work_of(node))

    def prices(self, parts: Sequence[Graph], names: Sequence[str], budget_s: float) -> list[Price]:
        works = [[work_of(node) for node in part.nodes] for part in parts]
        total = [Work(sum(work.flops for work in part), sum(work.moved_bytes for work in part)) for part in works]
        return [Price((self.rates.seconds(work),) * len(names)) for work in total]
