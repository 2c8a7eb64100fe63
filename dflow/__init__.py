"""Stateful dataflow on JAX and XLA: variables, queues and clusters behind ordinary Python functions.

Decorate a function of `jax.numpy` code with `dflow.jit`, and it may read and write `dflow.Variable`s. The same
function runs in one process or over a cluster that `dflow launch` starts.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflow.api import *  # noqa: F403

__version__ = "0.1.0"

# JAX reads this when it first looks for devices. Unset, it reserves three quarters of each GPU's memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def __getattr__(name: str) -> Any:
    # Imported on first use: the coordinator and the command line need no JAX, whose import takes a second.
    if name == "keras":
        return importlib.import_module("dflow.keras")
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    api = importlib.import_module("dflow.api")
    if name != "__all__" and name not in api.__all__:
        near_names = importlib.import_module("dflow.tracing.near_names")
        near = near_names.did_you_mean(name, api.__all__, f"it has {', '.join(api.__all__)}")
        raise AttributeError(f"module 'dflow' has no attribute {name!r}; {near}", name=name, obj=api)
    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *importlib.import_module("dflow.api").__all__]
