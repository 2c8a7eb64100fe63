"""Many hosts: tasks, coordinator, transfers, sharding, strategies and recovery."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflow.distributed.strategies.async_ import Async as Async

__all__ = ["Async"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the coordinator is in this package too, and starts without JAX.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module("dflow.distributed.strategies.async_"), name)
