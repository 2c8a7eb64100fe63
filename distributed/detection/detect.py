"""Detection over all kinds of environments, up to the first that describes a cluster.

The order: a cluster file, DFLOW_* variables, Slurm, Kubernetes, a TPU VM. The user's settings come before those of a
scheduler, which come before those of the machine: Slurm may run on TPU hosts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dflow.distributed.detection.cluster_file import VARIABLE, ClusterFile
from dflow.distributed.detection.cluster_spec import (
    COORDINATOR_VARIABLE,
    SCRIPT_JOB,
    ClusterSpec,
    Finding,
    SecuritySource,
    Variables,
)
from dflow.distributed.detection.kubernetes import from_kubernetes
from dflow.distributed.detection.slurm import from_slurm
from dflow.distributed.detection.tpu_vm import Metadata, from_tpu_vm
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


def from_variables(environment: Mapping[str, str]) -> Finding:
    """Return the finding for DFLOW_* variables, set by `dflow launch`, the user or a manifest.

    DFLOW_COORDINATOR is `host:port`, DFLOW_JOB the job (by default "worker"), DFLOW_INDEX the task's number in it, and
    DFLOW_ADDRESS the address where this process listens. Raises ConfigError if the task's number is missing.
    """
    said = Variables("DFLOW_* variables", environment)
    coordinator = said.get(COORDINATOR_VARIABLE)
    if not coordinator:
        return said.finding(f"{COORDINATOR_VARIABLE} is not set")
    job = said.get("DFLOW_JOB") or SCRIPT_JOB
    spec = ClusterSpec(coordinator, job, task_index(said), listens=said.get("DFLOW_ADDRESS"))
    return said.finding("they say so", spec)


def task_index(said: Variables) -> int:
    """Return the number of this task in its job; raises ConfigError if it is missing or no number.

    Its default is the number that Kubernetes gives a pod of an indexed Job or a StatefulSet.
    """
    text = said.get("DFLOW_INDEX")
    if not text and said.get("KUBERNETES_SERVICE_HOST"):
        ordinal = re.search(r"-([0-9]+)$", said.get("HOSTNAME"))
        text = said.get("JOB_COMPLETION_INDEX") or (ordinal[1] if ordinal else "")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"DFLOW_INDEX is {repr(text) if text else 'not set'}, so it is not known which worker this is",
            "start the script with `dflow launch`, set DFLOW_INDEX, or give connect() an index",
        )
    return int(text)


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
