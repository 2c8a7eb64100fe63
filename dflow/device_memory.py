"""Settings of GPU memory.

JAX reads these settings from the environment only once, when its backend starts: at the first use of a device. So
dflow's defaults are set on import, which starts no backend, and later changes are refused once it is up.
"""

from __future__ import annotations

import math
import os

from dflow.tracing.errors import ConfigError
from dflow.tracing.jax_frontend import is_backend_up

_FRACTION = "XLA_CLIENT_MEM_FRACTION"
#: An older name of the same setting; JAX refuses both together.
_OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


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
    os.environ[_FRACTION] = repr(float(given))
    os.environ.pop(_OLD_FRACTION, None)
