"""The programs of dflow's own that a cluster is started with: its coordinator, and stock tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.place import TaskProgram
from dflow.tracing.task_name import split_task_name


def coordinator_program(
    jobs: Mapping[str, int], address: str, more: Collection[str], environment: Mapping[str, str]
) -> TaskProgram:
    """The coordinator of these jobs, at `address`; when that is empty, where it chooses. `more` are words for it."""
    counts = [word for job, count in jobs.items() for word in ("--job", f"{job}={count}")]
    where = ("--address", address) if address else ()
    return _own(COORDINATOR, ("coordinator", *counts, *where, *more), environment)


def stock_program(task: str, more: Collection[str], environment: Mapping[str, str]) -> TaskProgram:
    """The stock task of that full name. `more` are words for it."""
    job, index = split_task_name(task)
    return _own(task, ("task", "--job", job, "--index", str(index), *more), environment)


def _own(task: str, words: Collection[str], environment: Mapping[str, str]) -> TaskProgram:
    """It computes little, and takes no accelerator from the workers unless told to."""
    return TaskProgram(task, ("-P", "-m", "dflow", *words), environment, {"JAX_PLATFORMS": "cpu"})
