"""The hosts of `dflow launch --on ssh`, in a file like those of OpenMPI, and the host of each task:

    # a host for each line, as ssh knows it
    node1 slots=2
    10.0.0.2 slots=4 user=me port=2222
    big slots=0             # task servers alone

`slots` is the number of tasks that run the script there, by default 1. They fill the hosts in the order of the file.
Task servers go to the hosts with `slots=0`, if there are such, else to all hosts, one after the other. A task that is
started again stays on its host, where its snapshots may be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from dflow.tracing.errors import ConfigError

#: Names are passed to ssh: they are no options, and have nothing that a shell would read.
_NAME = r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_SETTINGS = {"slots": r"[0-9]{1,5}", "user": _USER, "port": r"[0-9]{1,5}"}


@dataclass(frozen=True)
class SshHost:
    """A host by its name for ssh. Without a user or port, ssh's own configuration decides."""

    name: str
    slots: int = 1
    user: str = ""
    port: int = 0


@dataclass(frozen=True)
class HostPart:
    """The share of a task: number `index` of the `count` tasks on `host` that run the script; a server is 0 of 0."""

    host: SshHost
    index: int = 0
    count: int = 0


def read_hosts(path: Path) -> tuple[SshHost, ...]:
    """Read a file of hosts. Raises ConfigError, which names the file and the line, if it is malformed or empty."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--hosts: the file {path} cannot be read: {error.strerror or error}") from error
    hosts: dict[str, SshHost] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            host = _host(words, f"{path}:{number}")
            if host.name in hosts:
                raise ConfigError(f"{path}:{number}: {host.name} is there already", "give one line more slots")
            hosts[host.name] = host
    if not hosts:
        raise ConfigError(f"--hosts {path}: expected at least one host, got none", "write one a line: node1 slots=2")
    return tuple(hosts.values())


def placed(hosts: Sequence[SshHost], servers: Sequence[str], scripts: Sequence[str]) -> dict[str, HostPart]:
    """Return each task's host and share, by full name; raises ConfigError if there are fewer slots than `scripts`."""
    slots = [host for host in hosts for _ in range(host.slots)]
    if len(slots) < len(scripts):
        raise ConfigError(
            f"--hosts: expected slots for {len(scripts)} tasks that run the script, got {len(slots)} on "
            f"{len(hosts)} hosts",
            "write a larger number of slots, as in node1 slots=4, or start fewer tasks",
        )
    used = slots[: len(scripts)]
    parts = {
        task: HostPart(host, used[:number].count(host), used.count(host))
        for number, (task, host) in enumerate(zip(scripts, used, strict=True))
    }
    for_servers = [host for host in hosts if not host.slots] or hosts
    return parts | {task: HostPart(host) for task, host in zip(servers, cycle(for_servers), strict=False)}


def _host(words: Sequence[str], where: str) -> SshHost:
    user, at, name = words[0].rpartition("@")
    if re.fullmatch(_NAME, name) is None:
        raise ConfigError(f"{where}: expected the name of a host, got {words[0]!r}", "write: node1 slots=2")
    settings: dict[str, str] = {}
    for word in ([f"user={user}"] if at else []) + list(words[1:]):
        key, _, value = word.partition("=")
        if key not in _SETTINGS or re.fullmatch(_SETTINGS[key], value) is None:
            raise ConfigError(f"{where}: expected slots=N, user=NAME or port=N, got {word!r}", "write: node1 slots=2")
        settings[key] = value
    return SshHost(name, int(settings.get("slots", 1)), settings.get("user", ""), int(settings.get("port", 0)))
