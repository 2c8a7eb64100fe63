"""Detection over all kinds of environments, up to the first that describes a cluster.

The order: a cluster file, DFLOW_* variables, Slurm, Kubernetes, a TPU VM. The user's settings come before those of a
scheduler, which come before those of the machine: Slurm may run on TPU hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dflow.distributed.detection.cluster_file import VARIABLE, ClusterFile
from dflow.distributed.detection.cluster_spec import (
    SCRIPT_JOB,
    ClusterSpec,
    Finding,
    SecuritySource,
    Variables,
)
from dflow.distributed.detection.kubernetes import from_kubernetes
from dflow.distributed.detection.slurm import from_slurm
from dflow.distributed.detection.tpu_vm import Metadata, from_tpu_vm
from dflow.distributed.detection.variables import from_variables, task_index
from dflow.distributed.transport.security.configuration import CERTIFICATE_VARIABLES, SECRET_VARIABLE
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.environment import read
from dflow.tracing.errors import ConfigError


def detect(
    environment: Mapping[str, str], product: str, metadata: Metadata, read_file: Callable[[str], ClusterFile]
) -> tuple[Finding, ...]:
    """Return the finding for each kind of environment, up to the first with a cluster.

    product    the product name of the machine
    metadata   reads an attribute of the instance of Google Compute Engine
    read_file  reads a cluster file
    raises     errors of the functions for each kind; ConfigError if DFLOW_INDEX or DFLOW_JOB is set without a cluster
    """
    kinds: tuple[Callable[[], Finding], ...] = (
        lambda: from_cluster_file(environment, read_file),
        lambda: from_variables(environment),
        lambda: from_slurm(environment),
        lambda: from_kubernetes(environment),
        lambda: from_tpu_vm(environment, product, metadata),
    )
    findings: list[Finding] = []
    for find in kinds:
        findings.append(find())
        if findings[-1].spec is not None:
            return tuple(findings)
    _refuse_task_of_none(environment)
    return tuple(findings)


def found_cluster(findings: Sequence[Finding]) -> ClusterSpec | None:
    """Return the detected cluster; None when this process runs standalone."""
    return findings[-1].spec if findings else None


def from_cluster_file(environment: Mapping[str, str], read_file: Callable[[str], ClusterFile]) -> Finding:
    """Return the finding for the file named by DFLOW_CLUSTER, as the task named by DFLOW_JOB and DFLOW_INDEX."""
    said = Variables("cluster file", environment)
    path = said.get(VARIABLE)
    if not path:
        return said.finding(f"{VARIABLE} is not set")
    job = said.get("DFLOW_JOB") or SCRIPT_JOB
    spec = read_file(path).spec(job, task_index(said))
    listens = said.get("DFLOW_ADDRESS") or spec.listens
    return said.finding(f"{path} says so", replace(spec, listens=listens))


def explained(findings: Sequence[Finding], environment: Mapping[str, str]) -> str:
    """Format the findings in `environment` for a person: the variables seen by each, and the conclusion."""
    lines = []
    for finding in findings:
        mark = "+" if finding.spec is not None else "-"
        lines.append(f"{mark} {finding.source}: {finding.why}")
        lines += [f"    {name}={value}" for name, value in finding.seen.items()]
    spec = found_cluster(findings)
    if spec is None:
        return "\n".join([*lines, "This process is alone: dflow.connect() gives a cluster of one."])
    jobs = f" ({', '.join(f'{job}={count}' for job, count in spec.jobs.items())})" if spec.jobs else ""
    starts = f" and starts {', '.join(map(short_task_name, spec.starts))}" if spec.starts else ""
    cluster = f"the cluster with its coordinator at {spec.coordinator}{jobs}{starts}"
    return "\n".join(
        [*lines, f"This process is {spec.job}:{spec.index} of {cluster}.", _proof(spec.security, environment)]
    )


def _refuse_task_of_none(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a task is configured without a cluster.

    Otherwise a misspelt DFLOW_COORDINATOR would let each worker train standalone.
    """
    which = next((name for name in ("DFLOW_INDEX", "DFLOW_JOB") if read(name, environment)), None)
    if which is None:
        return
    others = sorted(name for name in environment if name.startswith("DFLOW_") and name != which)
    raise ConfigError(
        f"{which} is {environment[which]!r}, so this is a task of a cluster, but nothing says of which: neither "
        f"DFLOW_COORDINATOR nor DFLOW_CLUSTER is set; set here: {', '.join(others) or 'no other DFLOW_* variable'}",
        f"set one of them, or give connect() the coordinator; to run alone, unset {which}",
    )


def _proof(security: SecuritySource, environment: Mapping[str, str]) -> str:
    said: list[Path | str | None] = [security.certificates, security.secret_file]
    said += [read(name, environment) for name in (CERTIFICATE_VARIABLES[0], SECRET_VARIABLE)]
    found = next((str(proof) for proof in said if proof), "")
    if not found:
        return "It has no certificate and no secret, so it speaks to this machine alone."
    return f"Its proof of who it is lies in {found}."
