"""Detection of a Slurm step: `srun` started several processes, each with the user's script.

This reads the variables that srun sets for each process, as the section "OUTPUT ENVIRONMENT VARIABLES" of its manual
page lists them (slurm.schedmd.com/srun.html). A batch script outside of `srun` has no SLURM_STEP_NODELIST, and a step
of one process has SLURM_STEP_NUM_TASKS=1: they are no cluster.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from dflow.distributed.detection.cluster_spec import Finding, Variables, even_cluster
from dflow.tracing.errors import ConfigError

SOURCE = "Slurm"
#: The range of ports for coordinators, below Linux's ephemeral ports; job and step number select one.
FIRST_PORT, PORTS = 20480, 8192
#: Most names in a list of hosts. No machine has more, so a longer list is a mistake, or an attempt to exhaust memory.
MAX_HOSTS = 1 << 20

_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_HOSTS = re.compile(f"{_NAME.pattern}(?:,{_NAME.pattern})*")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def from_slurm(environment: Mapping[str, str]) -> Finding:
    """Return Slurm's finding for this process. Raises ConfigError when a variable is missing or invalid."""
    said = Variables(SOURCE, environment)
    if not said.get("SLURM_JOB_ID"):
        return said.finding("no Slurm job: SLURM_JOB_ID is not set")
    hosts = said.get("SLURM_STEP_NODELIST")
    if not hosts:
        why = "in a Slurm job, but not started by srun: SLURM_STEP_NODELIST is not set, so this process is alone"
        return said.finding(why)
    processes = said.number("SLURM_STEP_NUM_TASKS", 0) or said.number("SLURM_NTASKS")
    if processes == 1:
        return said.finding("a step of one process, which is alone; srun --ntasks=N starts more")
    if said.number("SLURM_HET_SIZE", 1) > 1:
        raise ConfigError(
            f"{SOURCE}: this is a heterogeneous job (SLURM_HET_SIZE={said.seen['SLURM_HET_SIZE']}), whose components "
            "do not see each other's hosts",
            "write a cluster file and name it by DFLOW_CLUSTER, or say "
            "DFLOW_COORDINATOR, DFLOW_JOB and DFLOW_INDEX for each component",
        )
    nodes = expanded(hosts)
    number, node = said.number("SLURM_PROCID"), said.number("SLURM_NODEID")
    if number >= processes or node >= len(nodes):
        raise ConfigError(
            f"{SOURCE}: process {number} of {processes} on node {node} of {len(nodes)} ({hosts}) cannot be; "
            "were SLURM_* variables of another step kept in the environment?"
        )
    # The same in all processes of a step, and usually another for other jobs.
    port = FIRST_PORT + (said.number("SLURM_JOB_ID") + said.number("SLURM_STEP_ID", 0)) % PORTS
    is_first = said.number("SLURM_LOCALID") == 0
    spec = even_cluster(said, nodes[0], port, processes, number, node=node, nodes=len(nodes), is_first=is_first)
    return said.finding(f"process {number} of a step of {processes} on {len(nodes)} nodes", spec)


def expanded(hosts: str) -> list[str]:
    """Return the hosts, in order, of Slurm's short form of a list, such as `rack[0-1]n[08-11,15],login`.

    A number keeps its leading zeros. Several brackets in one name vary independently, the last one fastest.
    raises  ConfigError, which quotes the text, for a malformed list
    """
    if _HOSTS.fullmatch(hosts) is None:
        raise _unreadable(hosts)
    return [name for short in _NAME.findall(hosts) for name in _names(short, hosts)]


def _names(short: str, hosts: str) -> list[str]:
    choices = [_numbers(part[1], hosts) if part[1] is not None else [part[2]] for part in _PART.finditer(short)]
    count = 1
    for choice in choices:
        count *= len(choice)
        _refuse_too_many(count, hosts)
    return ["".join(name) for name in itertools.product(*choices)]


def _numbers(ranges: str, hosts: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        found = _RANGE.fullmatch(text.strip())
        if found is None:
            raise _unreadable(hosts)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise _unreadable(hosts)
        _refuse_too_many(len(numbers) + int(last) - int(first) + 1, hosts)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _refuse_too_many(count: int, hosts: str) -> None:
    if count > MAX_HOSTS:
        raise ConfigError(f"the list of hosts {hosts[:80]!r} stands for more than {MAX_HOSTS} hosts")


def _unreadable(hosts: str) -> ConfigError:
    return ConfigError(f"{hosts[:80]!r} is no list of hosts; one looks like node1,node[03-07],rack[0-1]n[1-4]")
