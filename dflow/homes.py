"""Where functions run: this process, or the cluster that their variables live in."""

from __future__ import annotations

from typing import cast

from dflow.lowering.local import LocalHome, RunnerHome
from dflow.tracing.context import set_default_home
from dflow.tracing.errors import VariableError
from dflow.tracing.source import at, caller
from dflow.tracing.trace import Traced

LOCAL = LocalHome()
set_default_home(LOCAL)


def home_of(traced: Traced) -> RunnerHome:
    """The home that runs a trace: that of its variables. Raises VariableError when they are of two clusters."""
    homes = {variable.home for variable in traced.variables if variable.home is not LOCAL}
    if len(homes) > 1:
        names = ", ".join(variable.name for variable in traced.variables)
        raise VariableError(f"one function uses variables of {len(homes)} clusters ({names}){at(caller())}")
    return cast(RunnerHome, next(iter(homes), LOCAL))
