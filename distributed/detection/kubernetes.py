"""Detection of a Kubernetes pod of an indexed Job, or of a StatefulSet, behind a headless Service.

Kubernetes sets JOB_COMPLETION_INDEX and the host name `<job>-<index>` in the pods of an indexed Job, and the host name
`<set>-<index>` in the pods of a StatefulSet (kubernetes.io: "Job with Pod-to-Pod Communication", "StatefulSets: Stable
Network ID"); HOSTNAME contains it. Each pod has the address `<host name>.<service>`. Kubernetes sets neither the number
of pods nor the Service's name, so the manifest must, by DFLOW_WORKERS and DFLOW_SERVICE. A pod with neither of them is
no part of a cluster, since the pods of many indexed Jobs are independent of each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dflow.distributed.detection.cluster_spec import DEFAULT_PORT, Finding, Variables, even_cluster
from dflow.tracing.errors import ConfigError

SOURCE = "Kubernetes"
_REMEDY = (
    "give the container DFLOW_SERVICE, the name of the headless Service that is the pods' subdomain, and "
    "DFLOW_WORKERS, how many pods there are; see docs/launchers.md"
)


def from_kubernetes(environment: Mapping[str, str]) -> Finding:
    """Return the finding for this process in a pod. Raises ConfigError when the variables are incomplete or invalid."""
    said = Variables(SOURCE, environment)
    if not said.get("KUBERNETES_SERVICE_HOST"):
        return said.finding("no pod: KUBERNETES_SERVICE_HOST is not set")
    service, workers = said.get("DFLOW_SERVICE"), said.get("DFLOW_WORKERS")
    index, name = said.get("JOB_COMPLETION_INDEX"), said.get("HOSTNAME")
    if not service and not workers:
        return said.finding(f"a pod without the settings of a cluster; for one, {_REMEDY}")
    if not service:
        raise said.missing("DFLOW_SERVICE", "by which name pods are reached", _REMEDY)
    if not workers:
        raise said.missing("DFLOW_WORKERS", "how many pods there are", _REMEDY)
    if not name:
        raise said.missing("HOSTNAME", "which pod this is", "leave HOSTNAME as Kubernetes sets it")
    found = re.fullmatch(r"(.+)-([0-9]+)", name)
    if found is None or (index and index != found[2]):
        raise ConfigError(
            f"{SOURCE}: the host name {name!r} does not end in -{index or 'N'}, so this is no pod of an indexed Job or "
            "a StatefulSet with the host name that they give",
            "make it one, and do not set hostname in the pod",
        )
    count, number = said.number("DFLOW_WORKERS"), int(found[2])
    if number >= count:
        raise ConfigError(
            f"{SOURCE}: {name} is pod {number}, but DFLOW_WORKERS is {count}",
            "give it the number of pods: completions and parallelism of the Job, or replicas of the StatefulSet",
        )
    spec = even_cluster(said, f"{found[1]}-0.{service}", DEFAULT_PORT, count, number, node=number, nodes=count)
    return said.finding(f"pod {number} of {count} behind the Service {service}", spec)
