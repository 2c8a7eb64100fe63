"""Environments of schedulers, written from the documentation that each function names."""

from __future__ import annotations


def slurm(number: int, *, nodes: str = "node[08-11],gpu3", per_node: int = 2, nodes_count: int = 5) -> dict[str, str]:
    """`srun --nodes=5 --ntasks-per-node=2`, process `number`, blocks of processes on each node.

    Source: slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".
    """
    return {
        "HOSTNAME": "whatever",
        "SLURM_JOB_ID": "200505",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(nodes_count),
        "SLURM_LOCALID": str(number % per_node),
        "SLURM_NODEID": str(number // per_node),
        "SLURM_NTASKS": str(nodes_count * per_node),
        "SLURM_PROCID": str(number),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(nodes_count),
        "SLURM_STEP_NUM_TASKS": str(nodes_count * per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes_count})",
    }


#: A batch script before any srun. Source: slurm.schedmd.com/sbatch.html, "OUTPUT ENVIRONMENT VARIABLES".
SBATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "node[08-11],gpu3",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_NTASKS": "10",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def indexed_job(number: int, **more: str) -> dict[str, str]:
    """A pod of an indexed Job. Source: kubernetes.io, "Indexed Job for Parallel Processing with Static Work Assignment"
    and "Job with Pod-to-Pod Communication".
    """
    return {
        "HOSTNAME": f"train-{number}",
        "JOB_COMPLETION_INDEX": str(number),
        "KUBERNETES_PORT": "tcp://10.96.0.1:443",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        **more,
    }


def stateful_set(number: int, **more: str) -> dict[str, str]:
    """A pod of a StatefulSet. Source: kubernetes.io, "StatefulSets", section "Stable Network ID"."""
    return {"HOSTNAME": f"trainer-{number}", "KUBERNETES_SERVICE_HOST": "10.96.0.1", **more}


def gke_tpu(number: int, **more: str) -> dict[str, str]:
    """A pod on a slice of four hosts. Source: cloud.google.com, "Deploy TPU workloads in GKE", which lists the
    variables that GKE adds to pods that ask for google.com/tpu.
    """
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "TPU_WORKER_ID": str(number),
        "TPU_WORKER_HOSTNAMES": "job-0.tpu,job-1.tpu,job-2.tpu,job-3.tpu",
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        **more,
    }


#: Attributes of a TPU VM, as from `curl -H 'Metadata-Flavor: Google' .../instance/attributes/<name>`. Source: JAX's
#: cluster detection, for the attributes that it reads and the two forms of endpoints that it knows.
TPU_VM = {
    "agent-worker-number": "2",
    "worker-network-endpoints": "unknown:unknown:10.130.0.5,unknown:unknown:10.130.0.7,unknown:unknown:10.130.0.9",
    "tpu-env": "ACCELERATOR_TYPE: 'v4-24'\nNODE_ID: 'my-tpu'\nWORKER_ID: '2'\nZONE: 'us-central2-b'\n",
}
TPU_VM_OF_TWO_SLICES = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "10.130.1.5,10.130.1.7",
    "tpu-env": (
        "ACCELERATOR_TYPE: 'v4-16'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
        "MEGASCALE_COORDINATOR_ADDRESS: '10.130.0.5:8080'\n"
    ),
}
GOOGLE = "Google Compute Engine"
