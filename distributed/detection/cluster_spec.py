"""The description of a cluster that a process needs before it connects, and the findings that led to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflow.tracing.devices.task_name import task_name
from dflow.tracing.environment import read
from dflow.tracing.errors import ConfigError

COORDINATOR = "coordinator"
COORDINATOR_VARIABLE = "DFLOW_COORDINATOR"
#: The job of the task servers (stock tasks), and the job of the tasks that run the user's script.
STOCK_JOB = "ps"
SCRIPT_JOB = "worker"
#: The coordinator's default port, which other hosts know without asking.
DEFAULT_PORT = 7711


@dataclass(frozen=True)
class SecuritySource:
    """The credentials of tasks: a folder of certificates, or a file with a shared secret.

    If neither is set, the environment decides.
    """

    certificates: Path | None = None
    secret_file: Path | None = None


@dataclass(frozen=True)
class ClusterSpec:
    """This process is task `index` of `job` in the cluster whose coordinator is at `coordinator`, `host:port`.

    `jobs`      number of tasks of every job, if known
    `listens`   the host, or `host:port`, where this process listens; empty for its address towards the coordinator
    `starts`    the sidecar processes that this process must start: "coordinator", and full names of task servers
    """

    coordinator: str
    job: str
    index: int
    jobs: Mapping[str, int] = field(default_factory=dict)
    listens: str = ""
    starts: tuple[str, ...] = ()
    security: SecuritySource = field(default_factory=SecuritySource)

    @property
    def task(self) -> str:
        """The full name of this process's task."""
        return task_name(self.job, self.index)


@dataclass(frozen=True)
class Finding:
    """The result of detection for one kind of environment.

    `source`  the kind, such as "Slurm"
    `seen`    the variables and attributes that are set, with their values
    `spec`    the cluster, if there is one
    `why`     the reason for the spec, or for its absence
    """

    source: str
    seen: Mapping[str, str]
    spec: ClusterSpec | None
    why: str


class Variables:
    """An environment that records in `seen` the variables that were read and are set, for errors to list."""

    def __init__(self, source: str, environment: Mapping[str, str]) -> None:
        self._source = source
        self._environment = environment
        self.seen: dict[str, str] = {}

    def get(self, name: str) -> str:
        """Return the value; empty if it is not set."""
        of_dflow = name.startswith("DFLOW_")
        value = read(name, self._environment) if of_dflow else self._environment.get(name, "")
        if value:
            self.seen[name] = value
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return the value as a number of at least 0; `default` if it is not set. Raises ConfigError."""
        text = self.get(name)
        if not text and default is not None:
            return default
        if not text:
            raise self.missing(name, "a number")
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"{self._source}: {name} is {text!r}, but has to be a number of 0 or more")
        return int(text)

    def finding(self, why: str, spec: ClusterSpec | None = None) -> Finding:
        """Return the finding of these variables."""
        return Finding(self._source, self.seen, spec, why)

    def missing(self, name: str, what: str, remedy: str = "") -> ConfigError:
        """Return the error that `name`, which gives `what`, is not set; it lists the variables that are set."""
        seen = ", ".join(f"{name}={value}" for name, value in self.seen.items()) or "nothing else"
        return ConfigError(
            f"{self._source}: {name} is not set, which says {what}; seen: {seen}",
            remedy or "set it, or say DFLOW_COORDINATOR, DFLOW_JOB and DFLOW_INDEX instead",
        )


def even_cluster(
    said: Variables, host: str, port: int, processes: int, number: int, *, node: int, nodes: int, is_first: bool = True
) -> ClusterSpec:
    """Return the spec of process `number` of `processes` that are all started alike, as workers.

    host, port  where the coordinator is, whose port DFLOW_PORT overrides
    is_first    whether the process is the first of its node

    The first process also starts the coordinator, and the first process of each node starts the task servers of that
    node: of as many as DFLOW_PS says, by default one for each node, task i is on node i modulo `nodes`.
    """
    coordinator, stock = f"{host}:{said.number('DFLOW_PORT', port)}", said.number("DFLOW_PS", nodes)
    here = [index for index in range(stock) if index % nodes == node] if is_first else []
    starts = [COORDINATOR] if number == 0 else []
    return ClusterSpec(
        coordinator,
        SCRIPT_JOB,
        number,
        {STOCK_JOB: stock, SCRIPT_JOB: processes} if stock else {SCRIPT_JOB: processes},
        starts=(*starts, *(task_name(STOCK_JOB, index) for index in here)),
    )
