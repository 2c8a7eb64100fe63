"""What only this machine can tell: its name of itself, the metadata server beside it, and its address in a network.

Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from dflow.distributed.detection.cluster_file import read_cluster_file
from dflow.distributed.detection.detect import Surroundings
from dflow.distributed.transport.addresses import LOCAL_ADDRESS, also_near
from dflow.tracing.errors import DeadlineExceeded

METADATA_S = 10.0
_ATTEMPT_S = 2.0
_PAUSE_S = 0.2
_PRODUCT = Path("/sys/class/dmi/id/product_name")
#: Of the block that nobody has (RFC 5737): a route to it is the default route, and nothing is sent.
_ELSEWHERE = "192.0.2.1"


def surroundings(environment: Mapping[str, str] = os.environ) -> Surroundings:
    """Where this process is."""
    return Surroundings(environment, _product(), MetadataServer(environment), read_cluster_file)


class MetadataServer:
    """Reads attributes of an instance of Google Compute Engine.

    `timeout_s`  how long one attribute may take, attempts that fail included
    """

    def __init__(self, environment: Mapping[str, str], timeout_s: float = METADATA_S) -> None:
        host = environment.get("GCE_METADATA_HOST") or environment.get("GCE_METADATA_IP") or "metadata.google.internal"
        self._base = f"http://{host}/computeMetadata/v1/instance/attributes/"
        self._timeout_s = timeout_s
        # The server is on the machine itself, so no proxy is to be asked.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __call__(self, key: str) -> str | None:
        """The attribute; None when there is none of that name. Raises DeadlineExceeded."""
        request = urllib.request.Request(self._base + key, headers={"Metadata-Flavor": "Google"})
        deadline = time.monotonic() + self._timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                with self._opener.open(request, timeout=max(min(_ATTEMPT_S, left_s), 0.001)) as answer:
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
                    f"the metadata server did not give {key!r} within {self._timeout_s:g} s: {failure}; "
                    "say DFLOW_COORDINATOR, DFLOW_JOB and DFLOW_INDEX instead"
                ) from failure
            time.sleep(_PAUSE_S)


def own_host(coordinator: str) -> str:
    """The address of this machine that others in the coordinator's network reach it by; loopback where that is enough.

    A host name of one's own often stands for 127.0.1.1 in /etc/hosts, which nobody else can use: so it is not asked
    for, but which address a packet to the coordinator would go out from. When that is no other, or the coordinator's
    name is not known yet, it is the address of the default route.
    """
    tcp = coordinator.partition(";")[0]
    host = tcp.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host in ("localhost", "unix", "::1") or host.startswith("127."):
        return "127.0.0.1"
    found = _own_address_towards(host)
    if not found or found.startswith("127."):
        found = _own_address_towards(_ELSEWHERE)
    return found or "127.0.0.1"


def listening_address(said: str, coordinator: str) -> str:
    """Where a task listens: at `said`, a `host` or `host:port`, or else at the address that leads to the coordinator.

    All others reach it by this, so a task behind a translated address has to be told. Those of this machine also reach
    it by a Unix socket.
    """
    host = said or own_host(coordinator)
    if not said and host.startswith("127."):
        return LOCAL_ADDRESS
    return host if "unix:" in host else also_near(with_port(host))


def with_port(said: str) -> str:
    """A `host` or `host:port` as `host:port`, with port 0, which is any free one, where none is said."""
    if re.search(r"^(\[.*\]|[^:]*):[0-9]+$", said):
        return said
    return f"[{said}]:0" if ":" in said and not said.startswith("[") else f"{said}:0"


def _own_address_towards(host: str) -> str:
    """Empty when there is no way to it, or no such name yet."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
    return ""


def _product() -> str:
    try:
        return _PRODUCT.read_text().strip()
    except OSError:
        return ""
