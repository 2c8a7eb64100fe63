"""Where functions run: this process, or the cluster that their variables live in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

from dflow.config import CONFIG
from dflow.distributed.cluster import cluster_with
from dflow.lowering.local import LocalHome, Runner
from dflow.lowering.passes.base import Observer
from dflow.tracing.context import set_default_home
from dflow.tracing.device_name import is_on_task, task_of
from dflow.tracing.errors import VariableError
from dflow.tracing.graph import Graph
from dflow.tracing.source import at, caller
from dflow.tracing.trace import Traced

LOCAL = LocalHome(CONFIG.placement_s)
set_default_home(LOCAL)


class Runs(Protocol):
    """What can run functions: this process, or a cluster."""

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        """Lower a traced function whose variables live here, or in this process."""
        ...


def home_of(traced: Traced) -> Runs:
    """What runs a trace: the home of its variables; without such, the joined cluster whose tasks its scopes name.

    Raises VariableError when its variables are of two clusters.
    """
    homes: set[Any] = {variable.home for variable in traced.variables if variable.home is not LOCAL}
    if len(homes) > 1:
        names = ", ".join(variable.name for variable in traced.variables)
        raise VariableError(f"one function uses variables of {len(homes)} clusters ({names}){at(caller())}")
    if homes:
        return cast(Runs, homes.pop())
    tasks = {*_tasks_named(traced.graph)}
    return (cluster_with(tasks) if tasks else None) or LOCAL


def _tasks_named(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.device is not None and is_on_task(node.device):
            yield task_of(node.device)
        for body in node.bodies:
            yield from _tasks_named(body)
