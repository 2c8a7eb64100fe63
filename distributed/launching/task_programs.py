"""The programs of a cluster's tasks, and the launcher's interface to a target, where they run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.tracing.devices.task_name import split_task_name


@dataclass(frozen=True)
class TaskProgram:
    """The program of a task.

    `task`         its full name, or "coordinator"
    `words`        the words of the command after the Python interpreter's name
    `environment`  variables added to the environment of the target, which they override
    `defaults`     variables added to the environment of the target, which overrides them
    `ends_by`      signal that asks it to end with the whole launch; a task server saves its state at SIGTERM first
    """

    task: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    ends_by: signal.Signals = signal.SIGTERM


class Running(Protocol):
    """A started program."""

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of output."""

    def poll(self) -> int | None:
        """Return the exit status, negative for the signal that killed the program; None while it runs."""

    def terminate(self) -> None:
        """Ask the program and the processes that it started to end; without effect if it has ended."""

    def kill(self) -> None:
        """End the program and the processes that it started, and wait until it is gone."""


class LaunchTarget(Protocol):
    """Where programs are started: this machine, hosts or a Ray cluster."""

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> Running:
        """Start a program; `on_line` is called with each line of output, without its end, from any thread.

        raises  OSError when the program cannot be started
        """

    def close(self) -> None:
        """Release the resources of the target, once all started programs have ended."""


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
    return TaskProgram(task, ("-P", "-m", "dflow", *words), environment, {"JAX_PLATFORMS": "cpu"}, signal.SIGINT)
