"""Facts that only this machine can provide: its product name, its metadata server, and its address in a network.

Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dflow.distributed.detection.cluster_file import read_cluster_file
from dflow.distributed.detection.cluster_spec import Finding
from dflow.distributed.detection.detect import detect
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.loopback import LOOPBACK
from dflow.tracing.errors import DeadlineExceeded

METADATA_S = 10.0
_ATTEMPT_S = 2.0
_PAUSE_S = 0.2
_PRODUCT = Path("/sys/class/dmi/id/product_name")
#: An address reserved for documentation (RFC 5737), reached by the default route; no packet is sent there.
_ELSEWHERE = "192.0.2.1"


def detect_here(environment: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return the findings of `detect` for this process, with this environment."""
    product = ""
    with contextlib.suppress(OSError):
        product = _PRODUCT.read_text().strip()
    return detect(environment, product, partial(read_metadata, environment), read_cluster_file)


def read_metadata(environment: Mapping[str, str], key: str, timeout_s: float = METADATA_S) -> str | None:
    """Return an attribute of this instance of Google Compute Engine; None if there is none of that name.

    raises  DeadlineExceeded after `timeout_s`, which includes failed attempts
    """
    host = environment.get("GCE_METADATA_HOST") or environment.get("GCE_METADATA_IP") or "metadata.google.internal"
    base = f"http://{host}/computeMetadata/v1/instance/attributes/"
    request = urllib.request.Request(base + key, headers={"Metadata-Flavor": "Google"})
    # The server is local to the machine, so a proxy cannot reach it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            with opener.open(request, timeout=max(min(_ATTEMPT_S, left_s), 0.001)) as answer:
                return bytes(answer.read()).decode()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            failure: OSError = error
        except OSError as error:
            failure = error
        if time.monotonic() + _PAUSE_S >= deadline:
            raise DeadlineExceeded(
                f"the metadata server did not give {key!r} within {timeout_s:g} s: {failure}; "
                "say DFLOW_COORDINATOR, DFLOW_JOB and DFLOW_INDEX instead"
            ) from failure
        time.sleep(_PAUSE_S)


def own_host(coordinator: str) -> str:
    """Return this machine's address in the coordinator's network; loopback if the coordinator is on loopback.

    A machine's own name often resolves to 127.0.1.1 by /etc/hosts, which other machines cannot use. So this takes the
    source address of a packet to the coordinator. If that is loopback, or the coordinator's name does not resolve yet,
    it takes the source address of the default route.
    """
    tcp = coordinator.partition(";")[0]
    host = tcp.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host in ("localhost", "unix", "::1") or host.startswith("127."):
        return LOOPBACK
    found = _own_address_towards(host)
    if not found or found.startswith("127."):
        found = _own_address_towards(_ELSEWHERE)
    return found or LOOPBACK


def listening_address(said: str, coordinator: str) -> str:
    """Return the address for a task to listen at: `said`, a `host` or `host:port`, or else that of `own_host`.

    All other tasks connect to this address, so a task behind a translated address must have it configured. Tasks on
    this machine may also connect by a Unix socket.
    """
    host = said or own_host(coordinator)
    if not said and (host == LOOPBACK or host.startswith("127.")):
        return LOCAL_ADDRESS
    return host if "unix:" in host else f"{with_port(host)};unix:"


def with_port(said: str) -> str:
    """Return a `host` or `host:port` as `host:port`; without a port, it gets port 0, for any free one."""
    if re.search(r"^(\[.*\]|[^:]*):[0-9]+$", said):
        return said
    return f"[{said}]:0" if ":" in said and not said.startswith("[") else f"{said}:0"


def _own_address_towards(host: str) -> str:
    """Return this machine's source address for packets to `host`; empty without a route, or if the name is unknown."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
    return ""
