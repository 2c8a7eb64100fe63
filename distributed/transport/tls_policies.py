"""The security policies between machines: certificates, or a shared secret. Both use TLS 1.3.

Why no secret without TLS: a proof at the start does not protect the later messages, which an attacker on the path could
read and change. So the listener creates a self-signed certificate at its start, and the proof of the secret covers that
certificate; see `challenge`.

Invariants: Unix sockets are trusted as without these policies, if both ends are of one user. Every TCP connection is
encrypted, on loopback too. An unauthenticated peer gets only a certificate and a nonce.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
import ssl
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dflow.distributed.transport.addresses import Address, TcpAddress, UnixAddress
from dflow.distributed.transport.certificates import self_signed
from dflow.distributed.transport.challenge import MESSAGE_BYTES, Challenge, Role, require_long
from dflow.distributed.transport.identity import identities_of, require_admitted
from dflow.distributed.transport.private_files import read_private
from dflow.distributed.transport.security import SameMachine, Secured
from dflow.distributed.transport.tls_stream import TlsStream
from dflow.tracing.errors import ConfigError, DeadlineExceeded, SecurityError, TransportClosed

#: Validity of a self-signed certificate, which peers do not check.
_EPHEMERAL = timedelta(days=3650)


class MutualTls:
    """Mutual TLS: each side shows a certificate issued by the authority, and may use only the names in it.

    `certificate`, `key`, `authority`  PEM files, as `dflow certs issue` writes them
    raises  SecurityError when other users may read the key; ConfigError when a file is not of its kind, or the key is
            not the certificate's; OSError when a file cannot be read
    """

    def __init__(self, certificate: Path, key: Path, authority: Path) -> None:
        read_private(key)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT)
        for context in (self._server, self._client):
            try:
                context.load_cert_chain(certificate, key)
                context.load_verify_locations(authority)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"certificate {certificate}, key {key} and authority {authority} cannot be used: {error.reason}",
                    "give the three files that one `dflow certs issue` wrote",
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED

    @classmethod
    def in_folder(cls, folder: Path) -> MutualTls:
        """Return the policy with the files in a folder that `dflow certs issue` wrote; raises what the class raises."""
        return cls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")

    def may_listen(self, address: Address) -> None:
        """Accept any address."""

    def may_connect(self, address: Address) -> None:
        """Accept any address."""

    def secure_client(self, sock: socket.socket, address: Address, timeout_s: float) -> Secured:
        """Shake hands, and check that the certificate is for the host of `address`, if it names any hosts.

        See `SecurityPolicy.secure_client`.
        """
        if isinstance(address, UnixAddress):
            return SameMachine().secure_client(sock, address, timeout_s)
        secured, names = self._shake_hands(sock, self._client, timeout_s)
        _require_host(address, [name for kind, name in names if kind in ("DNS", "IP Address")])
        return secured

    def secure_server(self, sock: socket.socket, address: Address, timeout_s: float) -> Secured:
        """Shake hands; see `SecurityPolicy.secure_server`."""
        if isinstance(address, UnixAddress):
            return SameMachine().secure_server(sock, address, timeout_s)
        return self._shake_hands(sock, self._server, timeout_s)[0]

    def may_be_called(self, identity: str, name: str) -> None:
        """Raise SecurityError unless the name is in the certificate; over a Unix socket, accept any name."""
        if identity:
            require_admitted(identities_of(identity.split()), name)

    def _shake_hands(
        self, sock: socket.socket, context: ssl.SSLContext, timeout_s: float
    ) -> tuple[Secured, tuple[tuple[str, str], ...]]:
        stream = TlsStream(sock, context, is_server=context is self._server)
        stream.shake_hands(time.monotonic() + timeout_s)
        names = stream.alternative_names()
        uris = [name for kind, name in names if kind == "URI"]
        identities = identities_of(uris)
        if not identities:
            raise SecurityError(
                "the other side's certificate is for no task; issue one by `dflow certs issue DIR --name ...`"
            )
        return Secured(stream, " ".join(identity.uri for identity in identities)), names


class SharedSecret:
    """Both sides prove that they know the secret in `file`; a peer may then use any name.

    A process that listens needs the package `cryptography`.

    raises  SecurityError when other users may read the file, or the secret is too short; OSError when the file cannot
            be read
    """

    def __init__(self, file: Path) -> None:
        self._secret = read_private(file).strip()
        require_long(self._secret)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT)
        # Only the proof authenticates the listener's certificate, by covering it.
        self._client.verify_mode = ssl.CERT_NONE
        self._lock = threading.Lock()
        self._server: ssl.SSLContext | None = None
        self._server_certificate = b""

    def may_listen(self, address: Address) -> None:
        """Accept any address; raises ConfigError without `cryptography`, for TCP."""
        if not isinstance(address, UnixAddress):
            self._server_context()

    def may_connect(self, address: Address) -> None:
        """Accept any address."""

    def secure_client(self, sock: socket.socket, address: Address, timeout_s: float) -> Secured:
        """Shake hands and exchange proofs; see `SecurityPolicy.secure_client`."""
        if isinstance(address, UnixAddress):
            return SameMachine().secure_client(sock, address, timeout_s)
        deadline = time.monotonic() + timeout_s
        stream = TlsStream(sock, self._client, is_server=False)
        stream.shake_hands(deadline)
        return self._prove(stream, Role.CONNECTOR, stream.certificate(), deadline)

    def secure_server(self, sock: socket.socket, address: Address, timeout_s: float) -> Secured:
        """Shake hands and exchange proofs; see `SecurityPolicy.secure_server`."""
        if isinstance(address, UnixAddress):
            return SameMachine().secure_server(sock, address, timeout_s)
        deadline = time.monotonic() + timeout_s
        context, certificate = self._server_context()
        stream = TlsStream(sock, context, is_server=True)
        stream.shake_hands(deadline)
        return self._prove(stream, Role.LISTENER, certificate, deadline)

    def may_be_called(self, identity: str, name: str) -> None:
        """Accept any name: a peer that knows the secret is trusted."""

    def _prove(self, stream: TlsStream, role: Role, certificate: bytes, deadline: float) -> Secured:
        machine = Challenge(
            role,
            secret=self._secret,
            nonce=secrets.token_bytes(MESSAGE_BYTES),
            binding=hashlib.sha256(certificate).digest(),
        )
        answers = machine.begin()
        while True:
            if answers:
                _send_by(stream, b"".join(answers), deadline)
            if machine.done:
                return Secured(stream, "")
            answers = machine.receive(_receive_message(stream, deadline))

    def _server_context(self) -> tuple[ssl.SSLContext, bytes]:
        """Return the listener's TLS context and its certificate in DER, both created at the first call."""
        with self._lock:
            if self._server is None:
                pair = self_signed(datetime.now(UTC), _EPHEMERAL)
                context = _context(ssl.PROTOCOL_TLS_SERVER)
                # Python reads keys from files only; this folder is accessible to this user only.
                with tempfile.TemporaryDirectory(prefix="dflow-") as folder:
                    files = Path(folder, "certificate"), Path(folder, "key")
                    files[0].write_bytes(pair.certificate)
                    files[1].write_bytes(pair.key)
                    context.load_cert_chain(*files)
                self._server_certificate = ssl.PEM_cert_to_DER_cert(pair.certificate.decode())
                self._server = context
            return self._server, self._server_certificate


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # `_require_host` checks hosts, and `identity` names
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def _require_host(address: TcpAddress, hosts: list[str]) -> None:
    """Raise SecurityError if the certificate names hosts, but not the one that was dialled."""
    if hosts and _plain(address.host) not in map(_plain, hosts):
        raise SecurityError(
            f"the certificate shown at {address} is for {', '.join(hosts)}; "
            f"issue one by `dflow certs issue DIR --name ... --host {address.host}`"
        )


def _plain(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.strip()))
    except ValueError:
        return host.lower().removesuffix(".")


def _send_by(stream: TlsStream, data: bytes, deadline: float) -> None:
    stream.set_timeout(_left(deadline))
    if stream.send([memoryview(data)]) < len(data):
        raise _late()


def _receive_message(stream: TlsStream, deadline: float) -> bytes:
    data = bytearray(MESSAGE_BYTES)
    filled = 0
    while filled < len(data):
        stream.set_timeout(_left(deadline))
        try:
            count = stream.receive_into(memoryview(data)[filled:])
        except BlockingIOError:
            raise _late() from None
        if not count:
            raise TransportClosed(
                "the other side closed the connection during the challenge; see its log for why: "
                "does it know the same shared secret?"
            )
        filled += count
    return bytes(data)


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise _late()
    return left_s


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the challenge by the shared secret did not end in time")
