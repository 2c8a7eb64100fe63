"""Many hosts: tasks, coordinator, transfers, sharding, strategies and recovery."""

from dflow.distributed.strategies.async_ import Async

__all__ = ["Async"]
