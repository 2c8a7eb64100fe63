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
        return _finding(said, hosts, number, said.get)
    if said.get("TPU_SKIP_MDS_QUERY") or not product.startswith("Google"):
        return Finding(SOURCE, said.seen, None, "no TPU host: TPU_WORKER_HOSTNAMES is not set, and no TPU chip is here")
    text = metadata("agent-worker-number")
    if text is None:
        return Finding(SOURCE, said.seen, None, "a machine of Google's, but its metadata has no agent-worker-number")
    said.seen["agent-worker-number"] = text
    endpoints = metadata("worker-network-endpoints") or ""
    said.seen["worker-network-endpoints"] = endpoints
    if not text.strip().isdigit() or not endpoints.strip():
        raise ConfigError(
            f"{SOURCE}: the metadata have agent-worker-number {text!r} and worker-network-endpoints {endpoints!r}, "
            "which do not say which host this is",
            "say DFLOW_COORDINATOR, DFLOW_JOB and DFLOW_INDEX instead",
        )
    env = _tpu_env(metadata("tpu-env") or "")
    return _finding(said, _hosts(endpoints), int(text), lambda name: said.get(name) or env.get(name, ""))


def _finding(said: Variables, hosts: list[str], number: int, multislice: Callable[[str], str]) -> Finding:
    if number >= len(hosts):
        raise ConfigError(
            f"{SOURCE}: this is host {number}, but there are {len(hosts)}: {', '.join(hosts)}",
            "check TPU_WORKER_ID and TPU_WORKER_HOSTNAMES",
        )
    slices = _number("MEGASCALE_NUM_SLICES", multislice, 1)
    within = _number("MEGASCALE_SLICE_ID", multislice, 0)
    first = multislice("MEGASCALE_COORDINATOR_ADDRESS").partition(":")[0]
    count = slices * len(hosts)
    if count == 1:
        return Finding(SOURCE, said.seen, None, "the only host of its slice, which is alone")
    if slices > 1 and not first:
        raise said.missing("MEGASCALE_COORDINATOR_ADDRESS", "where the first of several slices is")
    place = within * len(hosts) + number
    coordinator = f"{first or hosts[0]}:{said.number('DFLOW_PORT', DEFAULT_PORT)}"
    stock = said.number("DFLOW_PS", count)
    spec = even_cluster(coordinator, count, place, stock, node=place, nodes=count, is_first_of_node=True)
    return Finding(SOURCE, said.seen, spec, f"host {number} of {len(hosts)} in slice {within} of {slices}")


def _number(name: str, multislice: Callable[[str], str], default: int) -> int:
    text = multislice(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{SOURCE}: {name} is {text!r}, but has to be a number of 0 or more")
    return int(text)


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
