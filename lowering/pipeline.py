"""The passes, in order."""

from __future__ import annotations

from dflow.lowering.passes.base import Pass
from dflow.lowering.passes.bundle import Bundle
from dflow.lowering.passes.choose import BUDGET_S, Choose
from dflow.lowering.passes.cluster import FormClusters
from dflow.lowering.passes.donate import Donate
from dflow.lowering.passes.fold import Fold
from dflow.lowering.passes.merge import Merge
from dflow.lowering.passes.order import Order
from dflow.lowering.passes.partition import Partition
from dflow.lowering.passes.place import Place
from dflow.lowering.passes.prune import Prune
from dflow.lowering.passes.repeat import Repeat
from dflow.lowering.passes.schedule import Schedule
from dflow.lowering.placement.measure import Meter

#: The task of a standalone process.
ALONE = "/job:localhost/task:0"


def pipeline(
    local: str = ALONE,
    tasks: tuple[str, ...] = (ALONE,),
    devices: tuple[str, ...] = (),
    costs: Meter | None = None,
    budget_s: float = BUDGET_S,
) -> tuple[Pass, ...]:
    """Return the passes for a caller on the task `local` of a cluster with these tasks.

    devices   the caller's devices, such as `cpu:0`, the default one first
    costs     their costs, for nodes that are open to a choice of device; with None these nodes stay open
    budget_s  time for these choices, in s
    """
    place = Place(local, tasks, devices)
    return (
        Prune(),  # first: the later passes have fewer nodes to treat
        Merge(),  # before place: equal nodes must be on one task
        *([] if costs is None else [Choose(place, costs, budget_s)]),  # before place: open choices become devices
        place,
        Fold(local),  # before partition: known numbers need not be sent
        Repeat(),  # before partition: values that are cheap to make need not be sent
        Partition(local),  # from here on, no operand crosses a device border
        Order(),  # before cluster: it reads order edges, not the order of the list
        FormClusters(),
        Bundle(),  # after cluster: results of one call are ready together
        Schedule(),  # after cluster: its edges are between copies and calls
        Donate(),  # last: needs the final set of effects of each call
    )
