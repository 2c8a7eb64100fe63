"""The address of a dashboard, and the packages that serve it."""

from __future__ import annotations

import importlib.util

from dflow.distributed.transport.addresses import TcpAddress, parse_address
from dflow.distributed.transport.loopback import LOOPBACK
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.tracing.errors import ConfigError

#: Beginning of the first line of `dflow dashboard`, before its address.
SERVING = "dflow dashboard: "
#: Packages of the extra `dashboard`, which serve it.
PACKAGES = ("httptools", "starlette", "uvicorn")


def require_dashboard(listens: str, security: SecurityPolicy) -> TcpAddress:
    """Return the address of a dashboard at `listens`: `8080` for loopback, `0.0.0.0:8080` or `[::1]:8080`.

    raises  ConfigError for a malformed address, or if its packages are not installed; SecurityError for an address off
            this machine without certificates or a secret
    """
    host, _, port = listens.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"address of the dashboard: expected a port or HOST:PORT, got {listens!r}", "give 8080, or 0")
    address = parse_address(f"{host}:{port}" if host else str(TcpAddress(LOOPBACK, int(port))))
    assert isinstance(address, TcpAddress)
    security.check_address(address, listens=True)
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"packages of the dashboard: expected {' and '.join(PACKAGES)}, got none of {' and '.join(missing)}",
            "pip install 'dflow[dashboard]'",
        )
    return address
