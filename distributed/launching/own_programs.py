"""The programs of dflow that a cluster starts: its coordinator and task servers (stock tasks)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.place import TaskProgram
from dflow.tracing.devices.task_name import split_task_name


def coordinator_program(
    jobs: Mapping[str, int], address: str, more: Collection[str], environment: Mapping[str, str]
) -> TaskProgram:
    """Return the program of the coordinator of `jobs` at `address`, or at one of its choice if that is empty.

    more  further words of its command line
    """
    counts = [word for job, count in jobs.items() for word in ("--job", f"{job}={count}")]
    where = ("--address", address) if address else ()
    return _own(COORDINATOR, ("coordinator", *counts, *where, *more), environment)


def stock_program(task: str, more: Collection[str], environment: Mapping[str, str]) -> TaskProgram:
    """Return the program of the task server with the full name `task`; `more` are further words of its command line."""
    job, index = split_task_name(task)
    return _own(task, ("task", "--job", job, "--index", str(index), *more), environment)


def _own(task: str, words: Collection[str], environment: Mapping[str, str]) -> TaskProgram:
    """Return a program that runs on the CPU by default: it computes little, and leaves accelerators to the workers."""
    return TaskProgram(task, ("-P", "-m", "dflow", *words), environment, {"JAX_PLATFORMS": "cpu"})
