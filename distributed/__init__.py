"""Clusters of tasks: the coordinator, transfers between tasks, launching, and training strategies."""

from dflow.distributed.strategies.all_reduce import AllReduce
from dflow.distributed.strategies.async_ import Async
from dflow.distributed.strategies.hybrid import Hybrid
from dflow.distributed.strategies.strategy import Strategy, StrategyRun
from dflow.distributed.strategies.sync import Sync
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.shared_secret import SharedSecret

__all__ = ["AllReduce", "Async", "Hybrid", "MutualTls", "SharedSecret", "Strategy", "StrategyRun", "Sync"]
