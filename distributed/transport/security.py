"""Security policies: the checks that a connection must pass before its first message is accepted.

Why: the transport would carry bytes to any process that answers. One object, passed to the transport, decides whether
a peer belongs to the cluster. A policy may encrypt the connection, or run a challenge over it first.

Invariants: the policy is checked before listening and connecting, and no frame is read from a connection until
`secure_client` or `secure_server` has returned for it. The default policy is `SameMachine`.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple, Protocol

from dflow.distributed.transport.addresses import Address, UnixAddress
from dflow.distributed.transport.stream import SocketStream, Stream
from dflow.tracing.errors import SecurityError

_CREDENTIALS = struct.Struct("3i")


class Secured(NamedTuple):
    """A connection that passed the policy. `identity` is the peer's proved identity; empty if there is none."""

    stream: Stream
    identity: str


class SecurityPolicy(Protocol):
    """The checks that a transport makes before it trusts a connection."""

    def may_listen(self, address: Address) -> None:
        """Raise SecurityError, with the remedy, if this address may not be listened on."""
        ...

    def may_connect(self, address: Address) -> None:
        """Raise SecurityError, with the remedy, if this address may not be connected to."""
        ...

    def secure_client(self, sock: socket.socket, address: Address, timeout_s: float) -> Secured:
        """Secure a connection to `address` within `timeout_s`; the socket is blocking and just connected.

        raises  SecurityError if either side refuses it, so that a retry is useless; OSError, TransportClosed or
                DeadlineExceeded
        """
        ...

    def secure_server(self, sock: socket.socket, address: Address, timeout_s: float) -> Secured:
        """Secure a connection that was accepted at `address`; raises what `secure_client` raises."""
        ...

    def may_be_called(self, identity: str, name: str) -> None:
        """Raise SecurityError if a peer with the proved `identity` may not use `name` in its `Hello`."""
        ...


class SameMachine:
    """Loopback addresses, and Unix sockets whose other end is a process of this user; nothing is encrypted."""

    def may_listen(self, address: Address) -> None:
        """Refuse addresses that other machines can reach."""
        _refuse_remote(address)

    def may_connect(self, address: Address) -> None:
        """Refuse addresses of other machines."""
        _refuse_remote(address)

    def secure_client(self, sock: socket.socket, address: Address, timeout_s: float) -> Secured:
        """Accept the connection; raises SecurityError if the other end of a Unix socket is of another user."""
        return _of_same_user(sock, address)

    def secure_server(self, sock: socket.socket, address: Address, timeout_s: float) -> Secured:
        """Accept the connection; raises SecurityError if the other end of a Unix socket is of another user."""
        return _of_same_user(sock, address)

    def may_be_called(self, identity: str, name: str) -> None:
        """Accept any name."""


def peer_uid(sock: socket.socket) -> int:
    """Return the user ID of the process at the other end of a connected Unix socket."""
    size = _CREDENTIALS.size
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def _of_same_user(sock: socket.socket, address: Address) -> Secured:
    if isinstance(address, UnixAddress):
        uid, mine = peer_uid(sock), os.geteuid()
        if uid != mine:
            raise SecurityError(
                f"the process at the other end of {address} is of user {uid} and this one of user {mine}; "
                "run both as one user"
            )
    return Secured(SocketStream(sock), "")


def _refuse_remote(address: Address) -> None:
    if not isinstance(address, UnixAddress) and not address.is_loopback:
        raise SecurityError(
            f"address {str(address)!r} is not a loopback address, and nothing says who may be spoken to there",
            "make certificates by `dflow certs init DIR` and `dflow certs issue DIR --name NAME --host HOST`, and"
            "\n  set DFLOW_TLS_CERT, DFLOW_TLS_KEY and DFLOW_TLS_CA as that prints; or a secret that all share by"
            "\n  `dflow certs secret FILE`, and set DFLOW_SECRET_FILE; or use 127.0.0.1, ::1 or localhost",
        )
