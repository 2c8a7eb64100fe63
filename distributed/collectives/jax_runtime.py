"""The start of JAX's multi-process runtime in the members of a group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.distributed.transport.addresses import TcpAddress, parse_address
from dflow.distributed.transport.loopback import LOOPBACK
from dflow.tracing.errors import StrategyError
from dflow.tracing.jax_frontend import is_backend_up, use_gloo_at, uses_gloo

#: JAX's own heartbeats decide nothing, since the cluster's coordinator notices deaths. In s, longer than any run.
NEVER_S = 10**8
#: Hosts that gRPC reaches without a proxy, in place of those in `no_proxy`.
_NO_PROXY = "no_grpc_proxy"
#: JAX's setting of a warning that a proxy may be used.
_WARNS_OF_PROXY = "jax_check_proxy_envs"
_SCRIPT = Path(__file__).with_name("jax_service.py")


def refuse_late_start() -> None:
    """Raise StrategyError if JAX has used a device already, after which it takes in no other processes."""
    if is_backend_up():
        raise StrategyError(
            "connect(collectives=True): expected a process that has used no device yet, got one with JAX's backends up",
            "call it before the first array is made, before jax.devices(), and once in a process",
        )


def start_runtime(group: ProcessGroup, host: str, timeout_s: float) -> Callable[[], None]:
    """Start JAX's runtime over the processes of a group: then `jax.devices()` lists the devices of all of them.

    Returns a function that ends the runtime. All members call it after `ProcessGroup.close`; arrays keep their values.
    Raises StrategyError if JAX's service ends at its start or cannot be reached, or this host has no address.

    host       address of this process's host for the other members
    timeout_s  longest wait for the other members
    """
    # What can fail comes before JAX's part: a process can start that once, and JAX aborts the process if it fails.
    listens = _host_here(host) if uses_gloo() else ""
    address, end_service = _served(host, len(group.members)) if group.rank == 0 else ("", lambda: None)
    try:
        address = group.exchange("the start of JAX's runtime", address)[0]
        _check_reached(address, timeout_s)
        with _without_proxy(address):
            jax.distributed.initialize(
                address,
                len(group.members),
                group.rank,
                # The process of rank 0 starts a service too, which no other uses: see `jax_service.py`.
                coordinator_bind_address=str(TcpAddress(LOOPBACK, 0)) if group.rank == 0 else None,
                # Under Slurm, JAX would take one device for each process.
                cluster_detection_method="deactivate",
                initialization_timeout=int(timeout_s),
                heartbeat_timeout_seconds=NEVER_S,
                shutdown_timeout_seconds=int(timeout_s),
            )
    except BaseException:
        end_service()
        raise
    if listens:
        use_gloo_at(listens)

    def close() -> None:
        jax.distributed.shutdown()
        end_service()

    return close


def _served(host: str, members: int) -> tuple[str, Callable[[], object]]:
    """Start JAX's service as a process; return its address, and a function that ends it.

    Raises StrategyError if the process ends before it has an address.
    """
    command = [sys.executable, str(_SCRIPT), host, str(members), str(NEVER_S)]
    # In a new session, since a launcher kills the rest of the session of a process that has died.
    service = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert service.stdout is not None
    address = service.stdout.readline().decode().strip()
    if not address:
        raise StrategyError(f"JAX's coordination service ended with status {service.wait()}: {command}")
    return address, partial(service.communicate, b".")


def _check_reached(address: str, timeout_s: float) -> None:
    """Raise StrategyError if JAX's service cannot be reached: JAX itself would abort the process."""
    parsed = parse_address(address)
    assert isinstance(parsed, TcpAddress)
    try:
        socket.create_connection((parsed.host, parsed.port), timeout_s).close()
    except OSError as error:
        raise StrategyError(
            f"JAX's coordination service, beside the first worker: expected a connection to {address}, got: "
            f"{error.strerror or error}",
            "let workers connect to each other's hosts at any port, or give connect() the address= that others reach",
        ) from error


@contextmanager
def _without_proxy(address: str) -> Iterator[None]:
    """Return a context that has gRPC connect to an address directly, not through a proxy of the environment.

    gRPC reads the environment when it makes a connection. The context sets a variable that only gRPC reads, the hosts
    that are reached without a proxy, and disables JAX's warning of proxies.
    """
    if not any("_proxy" in name.lower() for name in os.environ):
        yield
        return
    parsed = parse_address(address)
    assert isinstance(parsed, TcpAddress)
    before, warns = os.environ.get(_NO_PROXY), jax.config.read(_WARNS_OF_PROXY)
    others = before if before is not None else os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    os.environ[_NO_PROXY] = ",".join(filter(None, (others, parsed.host)))
    jax.config.update(_WARNS_OF_PROXY, False)
    try:
        yield
    finally:
        jax.config.update(_WARNS_OF_PROXY, warns)
        if before is None:
            del os.environ[_NO_PROXY]
        else:
            os.environ[_NO_PROXY] = before


def _host_here(host: str) -> str:
    """Return an address of this host at which the other members reach it. Raises StrategyError if there is none.

    That is `host`, unless the network translates it: then the address of the host's own name.
    """
    names = [host, socket.gethostname()]
    for family, kind, protocol, _, address in chain.from_iterable(map(_addresses_of, names)):
        with suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            return str(address[0])
    raise StrategyError(
        f"collectives of CPUs: expected an address of this host, got {' and '.join(map(repr, names))}, which are none",
        "give connect() the address= of one of its interfaces",
    )


def _addresses_of(name: str) -> Sequence[Any]:
    """Return what `getaddrinfo` finds for a host's name: nothing if the name has no address."""
    try:
        return socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return ()
