"""This machine as a target of a launch: each is a child process, which ends with the launcher, even a killed one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from dflow.distributed.launching.shares import Share
from dflow.distributed.launching.task_programs import TaskProgram
from dflow.distributed.process.child_process import ChildProcess
from dflow.distributed.process.parent_watch import LIFELINE_VARIABLE
from dflow.tracing.devices.task_name import short_task_name


class ThisMachine:
    """Starts programs on this machine, with the interpreter `python` and the environment of this process.

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
        command = [self._python, *program.words]
        name = short_task_name(program.task)
        return ChildProcess(
            name, command, environment, self._lifeline, on_line, ends_by=program.ends_by, cores=share.cores
        )

    def close(self) -> None:
        """Close the pipe that keeps the children alive: a child that still runs ends now."""
        os.close(self._held)
        os.close(self._lifeline)
