"""The environment variables of dflow: names, legal values, defaults and meanings.

Every layer reads them by `read`. `docs/environment.md` is made from this table (`make golden`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping

_PREFIX = "DFLOW_"
#: Least similarity, from 0 to 1, of a misspelt name.
_NEAR = 0.75
#: Variables that Kubernetes sets in each pod for a Service called `dflow`.
_OF_A_SERVICE = re.compile(r"DFLOW_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d\w*)")


_TABLE = """
DFLOW_CHECK | 0 or 1 | 0 | 1 verifies each graph before and after each pass
DFLOW_DUMP | a folder | none | write each traced graph there, before and after each pass
DFLOW_PLACEMENT_S | seconds above 0 | 3 | time limit for choosing the devices of ops in `device("auto")`
DFLOW_ACCEPT | short, not-finite or short,not-finite | none | what is no failure: batches that end too early, NaN losses
DFLOW_RUN_DIR | a folder | one among the temporary files | logs, recorded events and traces of a run
DFLOW_CLUSTER | a file | none | the cluster file, in TOML, that describes all tasks
DFLOW_COORDINATOR | host:port | none | address of the coordinator
DFLOW_JOB | a name | worker | the job that this process is a task of
DFLOW_INDEX | 0 or more | the pod's number in Kubernetes, else none | number of this task in its job
DFLOW_ADDRESS | host or host:port | the interface to the coordinator, and a free port | address to listen at
DFLOW_WORKERS | 1 or more | none | number of pods of the cluster (Kubernetes)
DFLOW_SERVICE | a name | none | the headless Service of the pods (Kubernetes)
DFLOW_PS | 0 or more | one for each host | number of task servers (Slurm, Kubernetes, TPU VMs)
DFLOW_PORT | a port | 7711; on Slurm by the job's number | port of the coordinator (Slurm, Kubernetes, TPU VMs)
DFLOW_SECRET_FILE | a file | none | the secret that all tasks share
DFLOW_TLS_CERT | a file | none | certificate of this task, in PEM
DFLOW_TLS_KEY | a file | none | private key of the certificate, in PEM
DFLOW_TLS_CA | a file | none | the authority that signs all certificates, in PEM
DFLOW_RESTARTED | jobs with commas, or none | not known | set by `dflow launch`: the jobs whose tasks are started again
DFLOW_METRICS_PORT | port or host:port; 0 for a free port | none | serve metrics for Prometheus there
DFLOW_LIFELINE_FD | a file descriptor | none | set by `dflow launch`: the process ends with its launcher
"""
#: By name: the legal values, the value if it is not set or empty, and the meaning, each as a text.
VARIABLES: Mapping[str, list[str]] = {
    name: texts for name, *texts in (line.split(" | ") for line in _TABLE.strip().splitlines())
}


def read(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the text of a declared variable; empty if it is not set."""
    if name not in VARIABLES:
        raise KeyError(name)
    return environment.get(name, "")


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the set variables that are spelt almost like a declared one, with that one's name."""
    found = {}
    for name in environment:
        if name.startswith(_PREFIX) and name not in VARIABLES and not _OF_A_SERVICE.fullmatch(name):
            known = [variable.removeprefix(_PREFIX) for variable in VARIABLES]
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1, _NEAR)
            found.update({name: _PREFIX + near[0]} if near else {})
    return found
