"""Clusters of tasks: the coordinator, transfers between tasks, launching, and training strategies."""

from dflow.distributed.strategies.async_ import Async
from dflow.distributed.strategies.sync import Sync
from dflow.distributed.transport.tls_policies import MutualTls, SharedSecret

__all__ = ["Async", "MutualTls", "SharedSecret", "Sync"]
