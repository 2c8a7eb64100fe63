"""State backends: this process, or the cluster that holds the variables of a function."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

from dflow.config import CONFIG
from dflow.distributed.cluster.cluster import cluster_with
from dflow.lowering.local import LocalHome
from dflow.lowering.state_backend import StateBackend
from dflow.tracing.devices.device_name import is_on_task, task_of
from dflow.tracing.errors import VariableError
from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.source import caller
from dflow.tracing.state.context import set_default_home
from dflow.tracing.state.resources import Variable

LOCAL = LocalHome(CONFIG.placement_s)
set_default_home(LOCAL)


def by_backend(variables: Mapping[str, Variable]) -> dict[StateBackend, dict[str, Variable]]:
    """Return the variables of each backend, by name."""
    found: dict[StateBackend, dict[str, Variable]] = defaultdict(dict)
    for name, variable in variables.items():
        found[cast(StateBackend, variable.home)][name] = variable
    return found


def home_of(traced: Traced) -> StateBackend:
    """Return the backend that runs a trace: that of its variables, or else the joined cluster that its scopes name.

    Raises VariableError if its variables are on two clusters.
    """
    homes: set[Any] = {variable.home for variable in traced.variables if variable.home is not LOCAL}
    if len(homes) > 1:
        names = ", ".join(variable.name for variable in traced.variables)
        raise VariableError(f"one function uses variables of {len(homes)} clusters ({names})", at=caller())
    if homes:
        return cast(StateBackend, homes.pop())
    tasks = {
        task_of(node.device) for node in traced.graph.all_nodes() if node.device is not None and is_on_task(node.device)
    }
    cluster = cluster_with(tasks) if tasks else None
    return LOCAL if cluster is None else cluster.home()
