"""The passes, in order."""

from __future__ import annotations

from functools import partial

from dflow.lowering.passes.base import Pass
from dflow.lowering.passes.bundle import bundle
from dflow.lowering.passes.choose import BUDGET_S, Choose
from dflow.lowering.passes.cluster import form_clusters
from dflow.lowering.passes.donate import donate
from dflow.lowering.passes.fold import fold
from dflow.lowering.passes.merge import merge
from dflow.lowering.passes.order import order
from dflow.lowering.passes.partition import partition
from dflow.lowering.passes.place import Place
from dflow.lowering.passes.prune import prune
from dflow.lowering.passes.repeat import repeat
from dflow.lowering.passes.schedule import schedule
from dflow.lowering.placement.measure import Meter

#: The task of a standalone process.
ALONE = "/job:localhost/task:0"

SIMPLIFY = (
    Pass("prune", prune),  # first: the later passes have fewer nodes to treat
    Pass("merge", merge),  # before place: equal nodes must be on one task
)


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
    # Open choices become devices, so this pass is before place.
    choose = [] if costs is None else [Pass("choose", Choose(place, costs, budget_s), is_of_whole=True)]
    return (
        *SIMPLIFY,
        *choose,
        Pass("place", place, is_of_whole=True),  # bodies share the devices of the whole, so they are placed with it
        Pass("fold", partial(fold, local=local)),  # before partition: known numbers need not be sent
        Pass("repeat", repeat),  # before partition: values that are cheap to make need not be sent
        # From here on, no operand crosses a device border. Names of edges are unique over the whole graph.
        Pass("partition", partial(partition, local=local), is_of_whole=True),
        Pass("order", order),  # before cluster: it reads order edges, not the order of the list
        Pass("cluster", form_clusters),
        Pass("bundle", bundle, is_of_whole=True),  # after cluster: results of one call are ready together
        Pass("schedule", schedule),  # after cluster: its edges are between copies and calls
        Pass("donate", donate),  # last: needs the final set of effects of each call
    )
