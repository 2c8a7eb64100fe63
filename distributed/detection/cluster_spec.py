"""What a process has to know of its cluster before it has spoken to anybody, and how that was found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflow.tracing.errors import ConfigError
from dflow.tracing.task_name import short_task_name, task_name

COORDINATOR = "coordinator"
#: The stock job, and the job of those that run the user's script.
STOCK_JOB = "ps"
SCRIPT_JOB = "worker"
#: Where the coordinator listens when nothing says so: the same on every host, so that it need not be asked for.
DEFAULT_PORT = 7711


@dataclass(frozen=True)
class SecuritySource:
    """Where the proofs lie by which tasks know each other: a folder of certificates, or a file with a shared secret.

    Neither leaves it to the environment.
    """

    certificates: Path | None = None
    secret_file: Path | None = None


@dataclass(frozen=True)
class ClusterSpec:
    """This process is task `index` of `job` in the cluster whose coordinator is at `coordinator`, `host:port`.

    `jobs`      every job and how many tasks it has, where that is known
    `listens`   the host, or `host:port`, where this process is reached; empty: the one that leads to the coordinator
    `starts`    what this process has to start beside itself: "coordinator", and full names of stock tasks
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
    """What one kind of environment says.

    `source`  what was looked for, such as "Slurm"
    `seen`    the variables and files that were there, with their values
    `spec`    the cluster, when there is one
    `why`     what the spec follows from, or what is missing for one
    """

    source: str
    seen: Mapping[str, str]
    spec: ClusterSpec | None
    why: str


def even_cluster(
    coordinator: str, processes: int, number: int, stock: int, *, node: int, nodes: int, is_first_of_node: bool
) -> ClusterSpec:
    """The spec of process `number` of `processes` that are all started alike, each of them as a worker.

    The first one starts the coordinator beside itself, and the first of each node the stock tasks of that node: task
    i of `stock` is on node i modulo `nodes`.
    """
    here = [index for index in range(stock) if index % nodes == node] if is_first_of_node else []
    starts = [COORDINATOR] if number == 0 else []
    return ClusterSpec(
        coordinator,
        SCRIPT_JOB,
        number,
        {STOCK_JOB: stock, SCRIPT_JOB: processes} if stock else {SCRIPT_JOB: processes},
        starts=(*starts, *(task_name(STOCK_JOB, index) for index in here)),
    )


def described(spec: ClusterSpec) -> str:
    """One line about a spec."""
    jobs = ", ".join(f"{job}={count}" for job, count in spec.jobs.items())
    parts = [f"{spec.job}:{spec.index} of the cluster with its coordinator at {spec.coordinator}"]
    parts += [f"({jobs})"] if jobs else []
    if spec.starts:
        parts.append("and starts " + ", ".join(map(short_task_name, spec.starts)))
    return " ".join(parts)


class Variables:
    """Reads of an environment that are remembered, so that an error can say what was there and what was not."""

    def __init__(self, source: str, environment: Mapping[str, str]) -> None:
        self._source = source
        self._environment = environment
        self.seen: dict[str, str] = {}

    def get(self, name: str) -> str:
        """The value; empty when it is not set."""
        value = self._environment.get(name, "")
        if value:
            self.seen[name] = value
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """The value as a number of 0 or more; `default` when it is not set. Raises ConfigError."""
        text = self.get(name)
        if not text and default is not None:
            return default
        if not text:
            raise self.missing(name, "a number")
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"{self._source}: {name} is {text!r}, but has to be a number of 0 or more")
        return int(text)

    def missing(self, name: str, what: str, remedy: str = "") -> ConfigError:
        """The error that `name` is not set, with what is."""
        seen = ", ".join(f"{name}={value}" for name, value in self.seen.items()) or "nothing else"
        remedy = remedy or "set it, or say DFLOW_COORDINATOR, DFLOW_JOB and DFLOW_INDEX instead"
        return ConfigError(f"{self._source}: {name} is not set, which says {what}; seen: {seen}\n  {remedy}")
