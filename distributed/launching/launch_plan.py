"""The tasks of a launch, and the program of each.

The tasks of a job either run the user's script, or are task servers (stock tasks), which hold variables and run no code
of the user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.task_programs import TaskProgram, coordinator_program, stock_program
from dflow.tracing.devices.task_name import split_task_name, task_name
from dflow.tracing.errors import ConfigError

_SETTING = re.compile(r"(?:([A-Za-z]\w*)(?::([0-9]+))?:)?([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """An environment variable for all tasks, for the tasks of one job, or for one task."""

    name: str
    value: str
    job: str = ""
    index: int | None = None

    @staticmethod
    def parse(text: str) -> Setting:
        """Parse `NAME=VALUE`, `JOB:NAME=VALUE` or `JOB:INDEX:NAME=VALUE`; raises ValueError for any other text."""
        found = _SETTING.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} sets no environment variable; write NAME=VALUE, worker:NAME=VALUE for one job, or "
                "worker:0:NAME=VALUE for one task"
            )
        job, index, name, value = found.groups()
        return Setting(name, value, job or "", int(index) if index else None)

    def applies_to(self, task: str) -> bool:
        """Whether this applies to the task of that full name; without a job, it applies to the coordinator too."""
        if not self.job:
            return True
        if task == COORDINATOR:
            return self.job == COORDINATOR and self.index is None
        job, index = split_task_name(task)
        return self.job == job and self.index in (None, index)


@dataclass(frozen=True)
class LaunchPlan:
    """A coordinator, task servers, and the tasks that run `script` with `arguments`.

    `stock`        number of task servers of each of their jobs
    `jobs`         number of tasks of each job that runs the script; no job is in both mappings
    `restarts`     the most restarts in a row of each task of a job, and of the coordinator; by default 0
    `environment`  variables for some or all of the tasks; later ones override earlier ones
    `snapshots`    the folder where task servers keep snapshots of their state, at intervals of `snapshot_every_s`;
                   empty for none
    `dashboard`    where the launcher serves a dashboard, as `[HOST:]PORT`; empty for none
    `state`        the file where the coordinator keeps the state that a restart needs; empty for none
    `accept`       ends of runs that are no failures; see `tracing/accepted_faults.py`
    raises         ConfigError when a name refers to no job, or to two, or a setting to an index beyond its job
    """

    script: str
    arguments: tuple[str, ...] = ()
    stock: Mapping[str, int] = field(default_factory=lambda: {"ps": 1})
    jobs: Mapping[str, int] = field(default_factory=lambda: {"worker": 1})
    restarts: Mapping[str, int] = field(default_factory=dict)
    environment: tuple[Setting, ...] = ()
    state: str = ""
    snapshots: str = ""
    snapshot_every_s: float = 60.0
    dashboard: str = ""
    accept: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        both = sorted({*self.stock} & {*self.jobs})
        if both:
            raise ConfigError(f"job {both[0]!r} is given both for stock tasks and for the script; give one count")
        for job in (*self.stock, *self.jobs):
            task_name(job, 0)
            if job == COORDINATOR:
                raise ConfigError(f"a job cannot be called {job!r}: that is the name of the coordinator itself")
        known = [*self.counts, COORDINATOR]
        for name in (*self.restarts, *(setting.job for setting in self.environment if setting.job)):
            if name not in known:
                raise ConfigError(f"there is no job {name!r} in this launch; its jobs are {', '.join(known)}")
        for setting in self.environment:
            count = self.counts.get(setting.job, 0)
            if setting.index is not None and setting.index >= count:
                raise ConfigError(
                    f"{setting.name} is set for {setting.job}:{setting.index}, but {setting.job} has {count} tasks, "
                    "numbered from 0"
                )

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks of every job."""
        return {**self.stock, **self.jobs}

    @property
    def servers(self) -> tuple[str, ...]:
        """The full names of the task servers."""
        return _tasks(self.stock)

    @property
    def workers(self) -> tuple[str, ...]:
        """The full names of the tasks that run the script."""
        return _tasks(self.jobs)

    @property
    def everywhere(self) -> dict[str, str]:
        """The environment variables that are for all tasks."""
        return {setting.name: setting.value for setting in self.environment if not setting.job}

    def program(self, task: str, coordinator: str) -> TaskProgram:
        """Return the program of `task`, for a coordinator at the address `coordinator`.

        The coordinator itself listens there; if it is empty, on a free port of the host DFLOW_ADDRESS, or of loopback.
        """
        said = {setting.name: setting.value for setting in self.environment if setting.applies_to(task)}
        if task == COORDINATOR:
            state = ("--state", self.state) if self.state else ()
            every = ("--snapshot-every", f"{self.snapshot_every_s:g}") if self.snapshots else ()
            return coordinator_program(self.counts, coordinator, (*state, *every), said)
        job, index = split_task_name(task)
        role = {"DFLOW_COORDINATOR": coordinator, "DFLOW_JOB": job, "DFLOW_INDEX": str(index)}
        if job in self.stock:
            snapshots = ("--snapshots", self.snapshots) if self.snapshots else ()
            return stock_program(task, snapshots, {**said, **role})
        restarted = ",".join(sorted(job for job, limit in self.restarts.items() if limit)) or "none"
        return TaskProgram(task, (self.script, *self.arguments), {"DFLOW_RESTARTED": restarted, **said, **role})


def _tasks(jobs: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(task_name(job, index) for job, count in jobs.items() for index in range(count))
