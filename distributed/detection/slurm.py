"""Detection of a Slurm step: `srun` started several processes, each with the user's script.

This reads the variables that srun sets for each process, as the section "OUTPUT ENVIRONMENT VARIABLES" of its manual
page lists them (slurm.schedmd.com/srun.html). A batch script outside of `srun` has no SLURM_STEP_NODELIST, and a step
of one process has SLURM_STEP_NUM_TASKS=1: they are no cluster.
"""

from __future__ import annotations

from collections.abc import Mapping

from dflow.distributed.detection.cluster_spec import Finding, Variables, even_cluster
from dflow.distributed.detection.hostlist import expanded
from dflow.tracing.errors import ConfigError

SOURCE = "Slurm"
#: The range of ports for coordinators, below Linux's ephemeral ports; job and step number select one.
FIRST_PORT, PORTS = 20480, 8192


def from_slurm(environment: Mapping[str, str]) -> Finding:
    """Return Slurm's finding for this process. Raises ConfigError when a variable is missing or invalid."""
    said = Variables(SOURCE, environment)
    if not said.get("SLURM_JOB_ID"):
        return Finding(SOURCE, said.seen, None, "no Slurm job: SLURM_JOB_ID is not set")
    hosts = said.get("SLURM_STEP_NODELIST")
    if not hosts:
        why = "in a Slurm job, but not started by srun: SLURM_STEP_NODELIST is not set, so this process is alone"
        return Finding(SOURCE, said.seen, None, why)
    processes = said.number("SLURM_STEP_NUM_TASKS", 0) or said.number("SLURM_NTASKS")
    if processes == 1:
        return Finding(SOURCE, said.seen, None, "a step of one process, which is alone; srun --ntasks=N starts more")
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
    port = said.number("DFLOW_PORT", _port(said.number("SLURM_JOB_ID"), said.number("SLURM_STEP_ID", 0)))
    stock = said.number("DFLOW_PS", len(nodes))
    is_first = said.number("SLURM_LOCALID") == 0
    spec = even_cluster(
        f"{nodes[0]}:{port}", processes, number, stock, node=node, nodes=len(nodes), is_first_of_node=is_first
    )
    return Finding(SOURCE, said.seen, spec, f"process {number} of a step of {processes} on {len(nodes)} nodes")


def _port(job: int, step: int) -> int:
    """Return the coordinator's port: equal in all processes of a step, and usually different for other jobs."""
    return FIRST_PORT + (job + step) % PORTS
