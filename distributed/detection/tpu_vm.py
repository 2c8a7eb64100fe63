"""Detection of a host of a TPU slice: on GKE by variables, on a TPU VM of Google Compute Engine by the metadata server.

This reads the same sources as JAX's own cluster detection (`jax.distributed.initialize` without arguments):
TPU_PROCESS_ADDRESSES or TPU_WORKER_HOSTNAMES, TPU_WORKER_ID; the attributes `agent-worker-number`,
`worker-network-endpoints` and `tpu-env` of the instance; MEGASCALE_* for several slices, from the environment or from
`tpu-env`. Invariant: the metadata server is queried only on Google's machines, and not if TPU_SKIP_MDS_QUERY is set,
which JAX does when it finds no chip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dflow.distributed.detection.cluster_spec import DEFAULT_PORT, Finding, Variables, even_cluster
from dflow.tracing.errors import ConfigError

SOURCE = "TPU VM"
#: Returns an attribute of the instance, None if there is none of that name. Raises DeadlineExceeded.
Metadata = Callable[[str], str | None]


def from_tpu_vm(environment: Mapping[str, str], product: str, metadata: Metadata) -> Finding:
    """Return the finding for this process on a TPU host.

    `product`   the product name of the machine, which begins with "Google" on Google's machines
    raises      ConfigError when the data are incomplete or invalid; DeadlineExceeded when the metadata server does not
                answer
    """
    said = Variables(SOURCE, environment)
    names = said.get("TPU_PROCESS_ADDRESSES") or said.get("TPU_WORKER_HOSTNAMES")
    if names:
        number = said.number("TPU_WORKER_ID")
        hosts = [name.strip().rpartition("://")[2].partition(":")[0] for name in names.split(",")]
        return _finding(said, hosts, number)
    if said.get("TPU_SKIP_MDS_QUERY") or not product.startswith("Google"):
        return said.finding("no TPU host: TPU_WORKER_HOSTNAMES is not set, and no TPU chip is here")
    text = metadata("agent-worker-number")
    if text is None:
        return said.finding("a machine of Google's, but its metadata has no agent-worker-number")
    endpoints = metadata("worker-network-endpoints") or ""
    if not text.strip().isdigit() or not endpoints.strip():
        raise ConfigError(
            f"{SOURCE}: the metadata have agent-worker-number {text!r} and worker-network-endpoints {endpoints!r}, "
            "which do not say which host this is",
            "say DFLOW_COORDINATOR, DFLOW_JOB and DFLOW_INDEX instead",
        )
    of_instance = _tpu_env(metadata("tpu-env") or "")
    said = Variables(SOURCE, of_instance | {name: value for name, value in environment.items() if value})
    said.seen |= {"agent-worker-number": text, "worker-network-endpoints": endpoints}
    return _finding(said, _hosts(endpoints), int(text))


def _finding(said: Variables, hosts: list[str], number: int) -> Finding:
    if number >= len(hosts):
        raise ConfigError(
            f"{SOURCE}: this is host {number}, but there are {len(hosts)}: {', '.join(hosts)}",
            "check TPU_WORKER_ID and TPU_WORKER_HOSTNAMES",
        )
    slices = said.number("MEGASCALE_NUM_SLICES", 1)
    within = said.number("MEGASCALE_SLICE_ID", 0)
    first = said.get("MEGASCALE_COORDINATOR_ADDRESS").partition(":")[0]
    count = slices * len(hosts)
    if count == 1:
        return said.finding("the only host of its slice, which is alone")
    if slices > 1 and not first:
        raise said.missing("MEGASCALE_COORDINATOR_ADDRESS", "where the first of several slices is")
    position = within * len(hosts) + number
    spec = even_cluster(said, first or hosts[0], DEFAULT_PORT, count, position, node=position, nodes=count)
    return said.finding(f"host {number} of {len(hosts)} in slice {within} of {slices}", spec)


def _hosts(endpoints: str) -> list[str]:
    """Parse endpoints separated by commas, each a host or `name:id:ip`, into hosts."""
    hosts = []
    for endpoint in endpoints.strip().split(","):
        parts = endpoint.strip().split(":")
        if len(parts) not in (1, 3):
            raise ConfigError(f"{SOURCE}: the endpoint {endpoint!r} in the metadata is neither a host nor name:id:ip")
        hosts.append(parts[-1])
    return hosts


def _tpu_env(text: str) -> dict[str, str]:
    """Parse lines of the form `KEY: 'value'`."""
    pairs = [line.partition(":") for line in text.splitlines()]
    return {key.strip(): value.strip().strip("'") for key, colon, value in pairs if colon}
