"""The parts of a task; in this order they handle deaths and the end of the task.

It imports JAX. `coordinator_role.py` does not: the coordinator starts in half the time without it.
"""

from __future__ import annotations

from functools import partial

from dflow.distributed.asynchronous.staleness_bounds import StalenessBounds
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.cluster.stock_task import StockTask, serve_task
from dflow.distributed.snapshots.task_snapshots import TaskSnapshots
from dflow.distributed.synchronous.step_aggregator import StepAggregator
from dflow.distributed.task.row_reads import RowReads
from dflow.distributed.task.task_checkpoints import TaskCheckpoints
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.variable_creation import VariableCreation
from dflow.distributed.training.served_batches import BatchReader

TASK_PARTS: tuple[type[TaskPart], ...] = (
    VariableCreation,
    StepAggregator,
    StalenessBounds,
    TaskCheckpoints,
    TaskSnapshots,
    BatchReader,
    RowReads,
)

join_cluster = partial(Cluster, parts=TASK_PARTS)
start_task = partial(StockTask, parts=TASK_PARTS)
run_task = partial(serve_task, parts=TASK_PARTS)
