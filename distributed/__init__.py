"""Clusters of tasks: the coordinator, transfers between tasks, launching, and training strategies."""

from dflow.distributed.asynchronous.async_ import Async
from dflow.distributed.collectives.all_reduce import AllReduce
from dflow.distributed.synchronous.hybrid import Hybrid
from dflow.distributed.synchronous.sync import Sync
from dflow.distributed.training.strategy import Strategy, StrategyRun
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.shared_secret import SharedSecret

__all__ = ["AllReduce", "Async", "Hybrid", "MutualTls", "SharedSecret", "Strategy", "StrategyRun", "Sync"]
