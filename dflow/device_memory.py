"""How much of a GPU's memory a process takes, and when.

JAX reads these settings from the environment when its backend starts, which is when it is first asked for a device, and
never again. So ours are made when dflow is imported, which starts no backend, and a later one is refused once it is up.
"""

from __future__ import annotations

import math
import os

from dflow.tracing.errors import ConfigError
from dflow.tracing.jax_frontend import is_backend_up
from dflow.tracing.source import at, caller

_FRACTION = "XLA_CLIENT_MEM_FRACTION"
#: An older name of the same, which JAX refuses beside the new one.
_OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def configure(*, memory_fraction: float) -> None:
    """Limit the memory that this process takes of each GPU.

    memory_fraction  the part of all the memory of a GPU, above 0 and at most 1; what JAX takes without it is 0.75.
                     It takes the place of XLA_CLIENT_MEM_FRACTION, and is a limit alone: memory is taken as it is
                     needed, unless XLA_PYTHON_CLIENT_PREALLOCATE says otherwise

    Raises ConfigError for another number, and when JAX has been asked for a device before, as by making an array or a
    variable: then it is too late.
    """
    given: object = memory_fraction
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1 or math.isnan(given):
        raise ConfigError(
            f"memory_fraction is {given!r}{at(caller())}\n  give a part of a GPU's memory: a number above 0, at most 1"
        )
    if is_backend_up():
        raise ConfigError(
            f"memory_fraction={given!r} comes too late: JAX has started, and keeps what it started with{at(caller())}\n"
            "  call dflow.configure before the first array or variable is made, and before jax.devices()"
        )
    os.environ[_FRACTION] = repr(float(given))
    os.environ.pop(_OLD_FRACTION, None)
