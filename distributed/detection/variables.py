"""Detection of a cluster by DFLOW_* variables, set by `dflow launch`, the user or a manifest.

DFLOW_COORDINATOR is `host:port`, DFLOW_JOB the job (by default "worker"), DFLOW_INDEX the task's number in it, and
DFLOW_ADDRESS the address where this process listens. The default of DFLOW_INDEX is the number that Kubernetes gives a
pod of an indexed Job or a StatefulSet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dflow.distributed.detection.cluster_spec import SCRIPT_JOB, ClusterSpec, Finding, Variables
from dflow.tracing.errors import ConfigError

SOURCE = "DFLOW_* variables"
COORDINATOR_VARIABLE = "DFLOW_COORDINATOR"


def from_variables(environment: Mapping[str, str]) -> Finding:
    """Return the variables' finding for this process. Raises ConfigError if the task's number is missing."""
    said = Variables(SOURCE, environment)
    coordinator = said.get(COORDINATOR_VARIABLE)
    if not coordinator:
        return said.finding(f"{COORDINATOR_VARIABLE} is not set")
    job = said.get("DFLOW_JOB") or SCRIPT_JOB
    spec = ClusterSpec(coordinator, job, task_index(said), listens=said.get("DFLOW_ADDRESS"))
    return said.finding("they say so", spec)


def task_index(said: Variables) -> int:
    """Return the number of this task in its job; raises ConfigError if it is missing or no number."""
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
