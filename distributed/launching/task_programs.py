"""The programs of a cluster's tasks, the launcher's interface to a target where they run, and this machine as one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.compilation_cache import cache_variables
from dflow.distributed.launching.shares import Share
from dflow.distributed.process.child_process import ChildProcess, Running
from dflow.distributed.process.parent_watch import LIFELINE_VARIABLE
from dflow.tracing.devices.task_name import short_task_name, split_task_name


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


class LaunchTarget(Protocol):
    """Where programs are started: this machine, hosts or a Ray cluster."""

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> Running:
        """Start a program; `on_line` is called with each line of output, without its end, from any thread.

        raises  OSError when the program cannot be started
        """

    def close(self) -> None:
        """Release the resources of the target, once all started programs have ended."""


class ThisMachine:
    """This machine: each program is a child process, which ends with the launcher, even if that is killed.

    Programs run with the interpreter `python` and the environment of this process, and keep what they compile
    (`compilation_cache`).

    `shares`  each task's share of the machine's GPUs and cores, by full name; a task without one may use all
    """

    def __init__(self, shares: Mapping[str, Share] | None = None, python: str = sys.executable) -> None:
        self._shares = shares or {}
        self._python = python
        self._lifeline, self._held = os.pipe()

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> ChildProcess:
        """Start a child process; see `LaunchTarget.start`."""
        share = self._shares.get(program.task, Share())
        ours = {LIFELINE_VARIABLE: str(self._lifeline), "PYTHONUNBUFFERED": "1"}
        # A task that crashes in native code prints the stacks of its threads.
        defaults = {"PYTHONFAULTHANDLER": "1", **program.defaults}
        environment = {**defaults, **os.environ, **share.environment, **program.environment, **ours}
        environment = {**cache_variables(environment), **environment}
        command = [self._python, *program.words]
        name = short_task_name(program.task)
        return ChildProcess(
            name, command, environment, self._lifeline, on_line, ends_by=program.ends_by, cores=share.cores
        )

    def close(self) -> None:
        """Close the pipe that keeps the children alive: a child that still runs ends now."""
        os.close(self._held)
        os.close(self._lifeline)


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
