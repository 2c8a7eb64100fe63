"""The cluster that DFLOW_* variables say, as `dflow launch` sets them, or a person or a manifest does.

DFLOW_COORDINATOR is `host:port`, DFLOW_JOB the job ("worker" without it), DFLOW_INDEX the task's number in it, and
DFLOW_ADDRESS where this process listens. Where DFLOW_INDEX is not set, the number that Kubernetes gives a pod of an
indexed Job or a StatefulSet is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dflow.distributed.detection.cluster_spec import SCRIPT_JOB, ClusterSpec, Finding, Variables
from dflow.tracing.errors import ConfigError

SOURCE = "DFLOW_* variables"
COORDINATOR_VARIABLE = "DFLOW_COORDINATOR"


def from_variables(environment: Mapping[str, str]) -> Finding:
    """What they say of this process. Raises ConfigError when it is not known which task this is."""
    said = Variables(SOURCE, environment)
    coordinator = said.get(COORDINATOR_VARIABLE)
    if not coordinator:
        return Finding(SOURCE, said.seen, None, f"{COORDINATOR_VARIABLE} is not set")
    job = said.get("DFLOW_JOB") or SCRIPT_JOB
    spec = ClusterSpec(coordinator, job, task_index(said), listens=said.get("DFLOW_ADDRESS"))
    return Finding(SOURCE, said.seen, spec, "they say so")


def task_index(said: Variables) -> int:
    """The number of this task in its job; raises ConfigError without one."""
    text = said.get("DFLOW_INDEX")
    if not text and said.get("KUBERNETES_SERVICE_HOST"):
        ordinal = re.search(r"-([0-9]+)$", said.get("HOSTNAME"))
        text = said.get("JOB_COMPLETION_INDEX") or (ordinal[1] if ordinal else "")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"DFLOW_INDEX is {repr(text) if text else 'not set'}, so it is not known which worker this is\n"
            "  start the script with `dflow launch`, set DFLOW_INDEX, or give connect() an index"
        )
    return int(text)
