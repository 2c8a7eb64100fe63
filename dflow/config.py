"""Settings of this process: those of the environment, read once, at import, and that of GPU memory.

All variables are declared in `tracing/environment.py`; those of clusters are read when a process joins one.

JAX reads its settings of GPU memory only once, when its backend starts: at the first use of a device. So dflow's
defaults are set on import, which starts no backend, and later changes are refused once it is up.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflow.lowering.passes.choose import BUDGET_S
from dflow.tracing.environment import misspelt, read
from dflow.tracing.errors import ConfigError
from dflow.tracing.jax_frontend import is_backend_up


@dataclass(frozen=True)
class Config:
    """Settings: DFLOW_CHECK, DFLOW_DUMP and DFLOW_PLACEMENT_S."""

    check: bool = False
    dump: Path | None = None
    placement_s: float = BUDGET_S


def from_environment(environment: Mapping[str, str]) -> Config:
    """Return the settings from these variables. Raises ConfigError for an invalid value; warns of misspelt names."""
    for name, near in misspelt(environment).items():
        warnings.warn(f"{name} is set, but dflow reads no variable of that name; did you mean {near}?", stacklevel=2)
    check, dump = read("DFLOW_CHECK", environment), read("DFLOW_DUMP", environment)
    if check not in ("", "0", "1"):
        raise ConfigError(f"DFLOW_CHECK is {check!r}; the legal values are 0 and 1")
    return Config(check == "1", Path(dump) if dump else None, _seconds(read("DFLOW_PLACEMENT_S", environment)))


def _seconds(text: str) -> float:
    try:
        found = float(text or BUDGET_S)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(f"DFLOW_PLACEMENT_S is {text!r}; the legal values are numbers of seconds above 0")
    return found


def configure(*, memory_fraction: float) -> None:
    """Limit the memory that this process takes of each GPU.

    memory_fraction  fraction of a GPU's total memory, above 0 and at most 1; JAX's default is 0.75. It overrides
                     XLA_CLIENT_MEM_FRACTION. It is only a limit: memory is allocated as needed, unless
                     XLA_PYTHON_CLIENT_PREALLOCATE says otherwise

    Raises ConfigError for any other value, and when JAX has already used a device, for example to create an array or a
    variable.
    """
    given: object = memory_fraction
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1 or math.isnan(given):
        raise ConfigError(f"memory_fraction is {given!r}", "give a part of a GPU's memory: a number above 0, at most 1")
    if is_backend_up():
        raise ConfigError(
            f"memory_fraction={given!r} comes too late: JAX has started, and keeps what it started with",
            "call dflow.configure before the first array or variable is made, and before jax.devices()",
        )
    os.environ["XLA_CLIENT_MEM_FRACTION"] = repr(float(given))
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # an older name of it; JAX refuses both together


CONFIG = from_environment(os.environ)
