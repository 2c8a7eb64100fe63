"""Clusters of tasks: the coordinator, transfers between tasks, launching, and training strategies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflow.distributed.asynchronous.async_ import Async
    from dflow.distributed.collectives.all_reduce import AllReduce
    from dflow.distributed.synchronous.hybrid import Hybrid
    from dflow.distributed.synchronous.sync import Sync
    from dflow.distributed.training.strategy import Strategy, StrategyRun
    from dflow.distributed.transport.security.mutual_tls import MutualTls
    from dflow.distributed.transport.security.shared_secret import SharedSecret

__all__ = ["AllReduce", "Async", "Hybrid", "MutualTls", "SharedSecret", "Strategy", "StrategyRun", "Sync"]

_FILES = {
    "AllReduce": "collectives.all_reduce",
    "Async": "asynchronous.async_",
    "Hybrid": "synchronous.hybrid",
    "MutualTls": "transport.security.mutual_tls",
    "SharedSecret": "transport.security.shared_secret",
    "Strategy": "training.strategy",
    "StrategyRun": "training.strategy",
    "Sync": "synchronous.sync",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: strategies import JAX, and the coordinator and the command line have no time for that.
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_FILES]
