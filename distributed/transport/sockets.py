"""Connections between processes over sockets: see `listener` and `dialler` for the two sides.

Invariants: the security policy is checked before listening, dialling and accepting a peer's identity. A frame that is
malformed, oversized or late ends only its own connection, with a logged reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from dflow.distributed.transport.addresses import Address, Endpoints, parse_endpoints
from dflow.distributed.transport.base import Handler, Peer
from dflow.distributed.transport.bind_and_dial import bind
from dflow.distributed.transport.dialler import FIRST_RETRY_S, LONGEST_RETRY_S, Dialler
from dflow.distributed.transport.handshake import Refused
from dflow.distributed.transport.link import Limits
from dflow.distributed.transport.listener import SocketListener
from dflow.distributed.transport.process_identity import host_identity
from dflow.distributed.transport.reactor import Reactor
from dflow.distributed.transport.security.policy import SameMachine, SecurityPolicy
from dflow.distributed.transport.stream import Deadline, reason_of
from dflow.tracing.errors import DeadlineExceeded, SecurityError, TransportClosed, WireError


class SocketTransport:
    """The transport over sockets, restricted by the policy `security`; see `addresses` for the syntax of addresses."""

    def __init__(self, limits: Limits | None = None, security: SecurityPolicy | None = None) -> None:
        self._limits = limits or Limits()
        self._security = security or SameMachine()
        self._reactor = Reactor(self._limits.stall_timeout_s)

    def listen(self, address: str, *, name: str, handler: Handler, resume_s: float | None = None) -> SocketListener:
        """Accept connections at `address`; see `base.Transport.listen`."""
        ways = parse_endpoints(address)
        endpoints = [ways.main] if ways.near is None else [ways.main, ways.near]
        for endpoint in endpoints:
            self._security.check_address(endpoint, listens=True)
        with contextlib.ExitStack() as opened:
            bounds = [opened.enter_context(contextlib.closing(bind(endpoint))) for endpoint in endpoints]
            opened.pop_all()
        return SocketListener(bounds, name, handler, self._limits_with(resume_s), self._security, self._reactor)

    def connect(
        self,
        address: str,
        *,
        name: str,
        handler: Handler,
        who: str,
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
        resume_s: float | None = None,
    ) -> Peer:
        """Connect to `address`, retrying while nothing answers there; see `base.Transport.connect`."""
        endpoints, limits = _ways_from_here(parse_endpoints(address)), self._limits_with(resume_s)
        for endpoint in endpoints:
            self._security.check_address(endpoint, listens=False)
        deadline, retry_s = Deadline.after(timeout_s), FIRST_RETRY_S
        while True:
            try:
                return self._connect_once(endpoints, name, handler, limits, deadline.left_s)
            except (WireError, SecurityError) as error:
                raise type(error)(f"cannot connect to {who} at {address}: {error}") from error
            except (OSError, TransportClosed, DeadlineExceeded) as error:
                if deadline.left_s <= retry_s or not is_wanted():
                    raise DeadlineExceeded(
                        f"{who} at {address} could not be reached within {timeout_s:g} s: {reason_of(error)}"
                        f"{_remedy(error)}"
                    ) from error
            time.sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    def _limits_with(self, resume_s: float | None) -> Limits:
        return self._limits if resume_s is None else dataclasses.replace(self._limits, resume_s=resume_s)

    def _connect_once(
        self, endpoints: Sequence[Address], name: str, handler: Handler, limits: Limits, timeout_s: float
    ) -> Peer:
        """Connect by the first address at which the other side listens; errors are those of the last address."""
        diallers = [Dialler(endpoint, name, limits, self._security, self._reactor) for endpoint in endpoints]
        for dialler in diallers[:-1]:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return dialler.connect(handler, timeout_s)
        return diallers[-1].connect(handler, timeout_s)


def _ways_from_here(ways: Endpoints) -> list[Address]:
    """Return the addresses to try from this process, fastest first."""
    if ways.near is not None and ways.identity == host_identity() != "":
        return [ways.near, ways.main]
    return [ways.main]


def _remedy(error: BaseException) -> str:
    if isinstance(error, Refused):
        return ""
    if isinstance(error, TransportClosed | ConnectionResetError | BrokenPipeError):
        return "; something listens there and refuses this side: has it certificates or a secret? its log says why"
    return "; check that it runs and that the address is right"
