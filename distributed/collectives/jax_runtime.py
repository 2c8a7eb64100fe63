"""The start of JAX's multi-process runtime in the members of a group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax

from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.tracing.errors import StrategyError
from dflow.tracing.jax_frontend import is_backend_up

#: JAX's own heartbeats decide nothing, since the cluster's coordinator notices deaths. In s, longer than any run.
NEVER_S = 10**8
_SCRIPT = Path(__file__).with_name("jax_service.py")


def refuse_late_start() -> None:
    """Raise StrategyError if JAX has used a device already, after which it takes in no other processes."""
    if is_backend_up():
        raise StrategyError(
            "connect(collectives=True): expected a process that has used no device yet, got one with JAX's backends up",
            "call it before the first array is made, before jax.devices(), and once in a process",
        )


class JaxRuntime:
    """JAX's runtime over the processes of a group; afterwards `jax.devices()` lists the devices of all of them.

    host       address of this process's host for the other members
    timeout_s  longest wait for the other members
    """

    def __init__(self, group: ProcessGroup, host: str, timeout_s: float) -> None:
        self._group = group
        self._service: subprocess.Popen[bytes] | None = None
        address = self._serve(host) if group.rank == 0 else ""
        address = group.exchange("the start of JAX's runtime", address)[0]
        jax.distributed.initialize(
            address,
            len(group.members),
            group.rank,
            # The process of rank 0 starts a service too, which no other uses: see `jax_service.py`.
            coordinator_bind_address="127.0.0.1:0" if group.rank == 0 else None,
            # Under Slurm, JAX would take one device for each process.
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout_s),
            heartbeat_timeout_seconds=NEVER_S,
            shutdown_timeout_seconds=int(timeout_s),
        )

    def _serve(self, host: str) -> str:
        """Start the service, and return its address."""
        command = [sys.executable, str(_SCRIPT), host, str(len(self._group.members)), str(NEVER_S)]
        # In a new session, since a launcher kills the rest of the session of a process that has died.
        self._service = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert self._service.stdout is not None
        address = self._service.stdout.readline().decode().strip()
        if not address:
            raise StrategyError(f"JAX's coordination service ended with status {self._service.wait()}: {command}")
        return address

    def close(self) -> None:
        """End the runtime. All members do so, after `ProcessGroup.close`; arrays keep their values."""
        jax.distributed.shutdown()
        if self._service is not None:
            self._service.communicate(b".")
