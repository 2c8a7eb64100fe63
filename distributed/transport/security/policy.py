"""Security policies: the checks that a connection must pass before its first message is accepted.

Why: the transport would carry bytes to any process that answers. One object, passed to the transport, decides whether
a peer belongs to the cluster. A policy may encrypt the connection, or run a challenge over it first.

Invariants: the policy is checked before listening and connecting, and no frame is read from a connection until `secure`
has returned for it. A Unix socket is trusted by every policy, and unencrypted, if both ends are of one user. The
default policy is `SameMachine`.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
from abc import ABC, abstractmethod
from typing import NamedTuple

from dflow.distributed.transport.addresses import Address, TcpAddress, UnixAddress
from dflow.distributed.transport.stream import Deadline, Stream
from dflow.tracing.errors import SecurityError

_CREDENTIALS = struct.Struct("3i")
_UNPROTECTED = (
    "no certificates or secret are configured\n"
    "  make certificates by `dflow certs init DIR` and `dflow certs issue DIR --name NAME --host HOST`, and\n"
    "  set DFLOW_TLS_CERT, DFLOW_TLS_KEY and DFLOW_TLS_CA as that prints; or a secret that all share by\n"
    "  `dflow certs secret FILE`, and set DFLOW_SECRET_FILE; or use 127.0.0.1, ::1 or localhost"
)


class Secured(NamedTuple):
    """A connection that passed the policy. `identity` is the peer's proved identity; empty if there is none."""

    stream: Stream
    identity: str


class SecurityPolicy(ABC):
    """The checks that a transport makes before it trusts a connection; by default any address and name will do."""

    def check_address(self, address: Address, *, listens: bool) -> None:  # noqa: B027
        """Raise SecurityError if this address may not be dialled, or with `listens`, not listened on."""

    def may_be_called(self, identity: str, name: str) -> None:  # noqa: B027
        """Raise SecurityError if a peer with the proved `identity` may not use `name` in its `Hello`."""

    def browser_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of a server for browsers, which show no certificate; None if there is no encryption.

        Such a server must authenticate its clients itself.
        """
        return None

    def secure(self, sock: socket.socket, address: Address, deadline: Deadline, *, is_server: bool) -> Secured:
        """Secure a connection to `address`, or one accepted there; the socket is blocking and just connected.

        raises  SecurityError if either side refuses it, so that a retry is useless; OSError, TransportClosed or
                DeadlineExceeded
        """
        if isinstance(address, UnixAddress):
            return _of_same_user(sock, address)
        return self.secure_tcp(sock, address, deadline, is_server=is_server)

    @abstractmethod
    def secure_tcp(self, sock: socket.socket, address: TcpAddress, deadline: Deadline, *, is_server: bool) -> Secured:
        """As `secure`, for a TCP connection."""


class SameMachine(SecurityPolicy):
    """Only addresses that this machine alone can reach; nothing is encrypted."""

    def check_address(self, address: Address, *, listens: bool) -> None:
        """Refuse addresses that are not of this machine alone."""
        if isinstance(address, TcpAddress) and not address.is_loopback:
            raise SecurityError(f"address {str(address)!r} is not a loopback address, and {_UNPROTECTED}")

    def secure_tcp(self, sock: socket.socket, address: TcpAddress, deadline: Deadline, *, is_server: bool) -> Secured:
        """Accept the connection."""
        return Secured(Stream(sock), "")


def peer_uid(sock: socket.socket) -> int:
    """Return the user ID of the process at the other end of a connected Unix socket."""
    size = _CREDENTIALS.size
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def _of_same_user(sock: socket.socket, address: UnixAddress) -> Secured:
    uid, mine = peer_uid(sock), os.geteuid()
    if uid != mine:
        raise SecurityError(
            f"the process at the other end of {address} is of user {uid} and this one of user {mine}; "
            "run both as one user"
        )
    return Secured(Stream(sock), "")
