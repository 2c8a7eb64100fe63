"""What to launch, and which program each of its tasks runs.

A job is either stock, and its tasks hold variables and run no code of the user's, or its tasks run the script.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.own_programs import coordinator_program, stock_program
from dflow.distributed.launching.place import TaskProgram
from dflow.distributed.launching.restarts import RestartPolicy
from dflow.tracing.errors import ConfigError
from dflow.tracing.task_name import split_task_name, task_name

_SETTING = re.compile(r"(?:([A-Za-z]\w*)(?::([0-9]+))?:)?([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """An environment variable for all tasks, for those of one job, or for one task."""

    name: str
    value: str
    job: str = ""
    index: int | None = None

    @staticmethod
    def parse(text: str) -> Setting:
        """`NAME=VALUE`, `JOB:NAME=VALUE` or `JOB:INDEX:NAME=VALUE`; raises ValueError for another text."""
        found = _SETTING.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} sets no environment variable; write NAME=VALUE, worker:NAME=VALUE for one job, or "
                "worker:0:NAME=VALUE for one task"
            )
        job, index, name, value = found.groups()
        return Setting(name, value, job or "", int(index) if index else None)

    def applies_to(self, task: str) -> bool:
        """Whether it is meant for the task of that full name; one without a job is for the coordinator too."""
        if not self.job:
            return True
        if task == COORDINATOR:
            return self.job == COORDINATOR and self.index is None
        job, index = split_task_name(task)
        return self.job == job and self.index in (None, index)


@dataclass(frozen=True)
class LaunchPlan:
    """The coordinator, stock tasks, and the tasks that run `script` with `arguments`.

    `stock`        the jobs of stock tasks, as job -> how many
    `jobs`         the jobs whose tasks run the script; the two share no name
    `restarts`     the policy of each job, the coordinator's too; a job without one is never started again
    `environment`  what is set for some or all of the tasks, later ones over earlier ones
    `state`        the file in which the coordinator keeps what it has to know when it is started again; empty: nowhere
    raises         ConfigError when a name stands for no job, or for two
    """

    script: str
    arguments: tuple[str, ...] = ()
    stock: Mapping[str, int] = field(default_factory=lambda: {"ps": 1})
    jobs: Mapping[str, int] = field(default_factory=lambda: {"worker": 1})
    restarts: Mapping[str, RestartPolicy] = field(default_factory=dict)
    environment: tuple[Setting, ...] = ()
    state: str = ""

    def __post_init__(self) -> None:
        both = sorted({*self.stock} & {*self.jobs})
        if both:
            raise ConfigError(f"job {both[0]!r} is given both for stock tasks and for the script; give one count")
        for job in (*self.stock, *self.jobs):
            task_name(job, 0)
            if job == COORDINATOR:
                raise ConfigError(f"a job cannot be called {job!r}: that is the name of the coordinator itself")
        self._require_jobs([*self.restarts, *(setting.job for setting in self.environment if setting.job)])
        for setting in self.environment:
            count = self.counts.get(setting.job, 0)
            if setting.index is not None and setting.index >= count:
                raise ConfigError(
                    f"{setting.name} is set for {setting.job}:{setting.index}, but {setting.job} has {count} tasks, "
                    "numbered from 0"
                )

    @property
    def counts(self) -> dict[str, int]:
        """Every job and how many tasks it has."""
        return {**self.stock, **self.jobs}

    @property
    def servers(self) -> tuple[str, ...]:
        """The full names of the stock tasks."""
        return _tasks(self.stock)

    @property
    def workers(self) -> tuple[str, ...]:
        """The full names of the tasks that run the script."""
        return _tasks(self.jobs)

    def program(self, task: str, coordinator: str) -> TaskProgram:
        """What `task` runs when the coordinator is at `coordinator`; for the coordinator itself, that is
        where it listens; when that is empty, on a free port of the host that DFLOW_ADDRESS or else loopback is.
        """
        said = {setting.name: setting.value for setting in self.environment if setting.applies_to(task)}
        if task == COORDINATOR:
            state = ("--state", self.state) if self.state else ()
            return coordinator_program(self.counts, coordinator, state, said)
        job, index = split_task_name(task)
        role = {"DFLOW_COORDINATOR": coordinator, "DFLOW_JOB": job, "DFLOW_INDEX": str(index)}
        if job in self.stock:
            return stock_program(task, (), {**said, **role})
        return TaskProgram(task, (self.script, *self.arguments), {**said, **role})

    def _require_jobs(self, names: Iterable[str]) -> None:
        known = [*self.counts, COORDINATOR]
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no job {name!r} in this launch; its jobs are {', '.join(known)}")


def _tasks(jobs: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(task_name(job, index) for job, count in jobs.items() for index in range(count))
