"""Many hosts: tasks, coordinator, transfers, sharding, strategies and recovery."""

from dflow.distributed.strategies.async_ import Async
from dflow.distributed.strategies.sync import Sync
from dflow.distributed.transport.tls_policies import MutualTls, SharedSecret

__all__ = ["Async", "MutualTls", "SharedSecret", "Sync"]
