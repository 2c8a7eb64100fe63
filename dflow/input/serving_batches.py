"""`dflow.data.serve` and `dflow.data.served`: tasks of another job that read batches for the workers."""

from __future__ import annotations

import contextlib
from typing import Any

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.training.served_batches import batch_reader, served_batches
from dflow.tracing.devices.task_name import split_task_name
from dflow.tracing.errors import InputError
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.source import caller

#: Time between two looks whether the workers have ended, in s.
_LOOK_S = 1.0


@suggests_keywords
def serve(batches: Any, cluster: Cluster, *, name: str = "data", until: str = "worker") -> None:
    """Give batches to the workers that ask for them by `served`, until all tasks of the job `until` have ended.

    batches  what is indexed by the number of a batch, such as `dflow.data.batches` of files: dicts by name and tuples
             of arrays, the same in all readers. Several threads call it concurrently
    name     the name under which workers ask for them

    A reader has no state: batch `number` is the same whichever reader gives it, so any of them may be killed and
    started again, and their number may change between two runs.

    Raises InputError for batches without a number; what `batches` raises goes to the worker that asked.
    """
    _check(batches, "serve")
    if hasattr(batches, "__len__"):
        with contextlib.suppress(TypeError):  # for batches without end
            len(batches)  # opens files before the first request
    batch_reader(cluster).serve(name, batches)
    for _ in cluster.while_running(until, every_s=_LOOK_S):
        pass


@suggests_keywords
def served(batches: Any, cluster: Cluster, *, job: str = "reader", name: str = "data") -> Any:
    """Return batches by number that the tasks of `job` read, `dflow launch --job reader=2`, or `batches` without any.

    The result has batches as `batches` has them, of read-only arrays, with ids in place of strings, as a step makes
    them. A worker asks for its next batches while its step runs. When a reader is down, others give its batches.

    job   the job whose tasks call `serve`; if the cluster has none, as in a standalone process, `batches` is returned
    name  as in `serve`

    Raises InputError for batches without a number. Taking a batch raises TaskLost if no reader serves for 120 s.
    """
    _check(batches, "served")
    if cluster.is_standalone or split_task_name(cluster.task)[0] == job:
        return batches
    found = served_batches(cluster, job, name)
    return batches if found is None else found


def _check(batches: Any, what: str) -> None:
    if not hasattr(batches, "__getitem__"):
        raise InputError(
            f"{what}: expected batches by number, got a {type(batches).__name__}",
            "give dflow.data.batches of files, arrays or a list",
            at=caller(),
        )
