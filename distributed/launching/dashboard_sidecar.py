"""The dashboard of a launch, a process of this machine. Invariant: its end is reported once, and the run goes on."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping

from dflow.distributed.launching.task_programs import TaskProgram
from dflow.distributed.launching.this_machine import ThisMachine
from dflow.distributed.process.child_process import describe_end
from dflow.distributed.transport.addresses import TcpAddress, parse_address
from dflow.distributed.transport.loopback import LOOPBACK
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.tracing.errors import ConfigError

#: Beginning of the first line of `dflow dashboard`, before its address.
SERVING = "dflow dashboard: "
NAME = "dashboard"
#: Packages of the extra `dashboard`, which serve it.
PACKAGES = ("httptools", "starlette", "uvicorn")
GRACE_S = 3.0


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


class DashboardSidecar:
    """The process, started by construction.

    coordinator  address of the coordinator
    address      address to serve it at, as `[HOST:]PORT`
    environment  variables, such as those of certificates
    on_line      called with each line that it prints, from any thread
    raises       OSError when it cannot be started
    """

    def __init__(
        self, coordinator: str, address: str, environment: Mapping[str, str], on_line: Callable[[str], None]
    ) -> None:
        self._machine = ThisMachine()
        words = ("-P", "-m", "dflow", "dashboard", "--coordinator", coordinator, "--address", address)
        self._child = self._machine.start(TaskProgram(NAME, words, environment, {"JAX_PLATFORMS": "cpu"}), on_line)
        self._is_over = False

    def end(self) -> str:
        """Return how the process has ended, at the first call after that; else an empty text."""
        status = None if self._is_over else self._child.poll()
        if status is None:
            return ""
        self._is_over = True
        return describe_end(status)

    def close(self) -> None:
        """End the process, by SIGKILL after `GRACE_S`."""
        self._child.terminate()
        deadline = time.monotonic() + GRACE_S
        while self._child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._child.kill()
        self._machine.close()
