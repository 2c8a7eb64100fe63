"""The cluster file, in TOML:

    coordinator = "10.0.0.1:7711"

    [jobs]
    ps = ["10.0.0.1:7712", "10.0.0.2:7712"]   # where each task listens, as host or host:port
    worker = 4                                # or the number of tasks

    [security]                                # needed if an address is on another machine
    certificates = "certificates"             # a folder, or
    secret_file = "secret"                    # a file; both relative to this one

The file does not say which task a process is; `ClusterFile.spec` takes that as arguments.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflow.distributed.detection.cluster_spec import ClusterSpec, SecuritySource
from dflow.tracing.devices.task_name import task_name
from dflow.tracing.errors import ConfigError

VARIABLE = "DFLOW_CLUSTER"


@dataclass(frozen=True)
class ClusterFile:
    """The contents of a cluster file. `jobs` has the address of each task, empty if the file gives none."""

    path: str
    coordinator: str
    jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    security: SecuritySource = field(default_factory=SecuritySource)

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks of every job."""
        return {job: len(addresses) for job, addresses in self.jobs.items()}

    def spec(self, job: str, index: int) -> ClusterSpec:
        """Return the spec for task `index` of `job`; raises ConfigError if the file has no such task."""
        if job not in self.jobs:
            raise ConfigError(f"{self.path} has no job {job!r}; it has {', '.join(self.jobs) or 'none'}")
        count = len(self.jobs[job])
        if not 0 <= index < count:
            raise ConfigError(f"{self.path} has {count} tasks of job {job!r}, numbered from 0, and no {job}:{index}")
        listens = self.jobs[job][index]
        return ClusterSpec(self.coordinator, job, index, self.counts, listens, security=self.security)


def read_cluster_file(path: str) -> ClusterFile:
    """Read a cluster file. Raises ConfigError, which names the file, if it cannot be read or is malformed."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"the cluster file {path} cannot be read: {error.strerror or error}") from error
    return parse_cluster_file(path, text)


def parse_cluster_file(path: str, text: str) -> ClusterFile:
    """Parse the text of a cluster file; raises ConfigError, which names `path`, if it is malformed."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the cluster file {path} is no TOML: {error}") from error
    _refuse_others(path, table, ("coordinator", "jobs", "security"))
    coordinator = table.get("coordinator")
    if not isinstance(coordinator, str) or not _port(coordinator):
        raise ConfigError(
            f'the cluster file {path} has coordinator = {coordinator!r}; write where it listens, as "host:port"'
        )
    jobs, security = table.get("jobs", {}), table.get("security", {})
    if not isinstance(jobs, dict) or not isinstance(security, dict):
        raise ConfigError(f"the cluster file {path}: jobs and security are tables; write [jobs] and [security]")
    _refuse_others(f"{path} [security]", security, ("certificates", "secret_file"))
    found = {job: _addresses(path, job, tasks) for job, tasks in jobs.items()}
    return ClusterFile(path, coordinator, found, _security(path, security))


def _addresses(path: str, job: str, tasks: Any) -> tuple[str, ...]:
    task_name(job, 0)
    if isinstance(tasks, int) and not isinstance(tasks, bool) and tasks >= 0:
        return ("",) * tasks
    if isinstance(tasks, list) and all(isinstance(task, str) and task for task in tasks):
        return tuple(tasks)
    raise ConfigError(
        f"the cluster file {path}: {job} = {tasks!r}; write how many tasks there are, or a list of where each listens"
    )


def _security(path: str, table: Mapping[str, Any]) -> SecuritySource:
    for name, value in table.items():
        if not isinstance(value, str) or not value:
            raise ConfigError(f"the cluster file {path}: {name} = {value!r}; write a path")
    folder = Path(path).parent
    return SecuritySource(**{name: folder / value for name, value in table.items()})


def _refuse_others(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    others = [name for name in table if name not in known]
    if others:
        raise ConfigError(
            f"the cluster file {where} has {others[0]!r}, which means nothing; legal are {', '.join(known)}"
        )


def _port(address: str) -> str:
    host, _, port = address.rpartition(":")
    return port if host and port.isdigit() and int(port) < 1 << 16 else ""
