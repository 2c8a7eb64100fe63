"""The policy of certificates: mutual TLS, where each side may use only the names in its certificate."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from pathlib import Path

from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.identity import identities_of, require_admitted
from dflow.distributed.transport.security.policy import Secured, SecurityPolicy
from dflow.distributed.transport.security.private_files import read_private
from dflow.distributed.transport.security.tls_stream import TlsStream, tls_context
from dflow.distributed.transport.stream import Deadline
from dflow.tracing.errors import ConfigError, SecurityError


class MutualTls(SecurityPolicy):
    """Mutual TLS: each side shows a certificate issued by the authority, and may use only the names in it.

    `certificate`, `key`, `authority`  PEM files, as `dflow certs issue` writes them
    raises  SecurityError when other users may read the key; ConfigError when a file is not of its kind, or the key is
            not the certificate's; OSError when a file cannot be read
    """

    def __init__(self, certificate: Path, key: Path, authority: Path) -> None:
        read_private(key)
        #: The PEM files of the certificate, its key and the authority, for libraries that take no `ssl.SSLContext`.
        self.files = certificate, key, authority
        self._server = tls_context(ssl.PROTOCOL_TLS_SERVER)
        self._client = tls_context(ssl.PROTOCOL_TLS_CLIENT)
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
        self._browsers = tls_context(ssl.PROTOCOL_TLS_SERVER)
        self._browsers.load_cert_chain(certificate, key)

    @classmethod
    def in_folder(cls, folder: Path) -> MutualTls:
        """Return the policy with the files that `dflow certs issue` wrote into `folder`; raises as the constructor."""
        return cls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")

    @property
    def server_context(self) -> ssl.SSLContext:
        """The TLS context of a listener, which accepts clients with a certificate by the authority."""
        return self._server

    def may_be_called(self, identity: str, name: str) -> None:
        """Raise SecurityError unless the name is in the certificate; over a Unix socket, accept any name."""
        if identity:
            require_admitted(identities_of(identity.split()), name)

    def browser_context(self) -> ssl.SSLContext:
        """Return a context with the certificate, which asks browsers for none."""
        return self._browsers

    def secure_tcp(self, sock: socket.socket, address: TcpAddress, deadline: Deadline, *, is_server: bool) -> Secured:
        """Shake hands; at the dialling side, check that the certificate is for the dialled host, if it names hosts."""
        stream = TlsStream(sock, self._server if is_server else self._client, is_server=is_server)
        stream.shake_hands(deadline)
        names = stream.alternative_names()
        identities = identities_of(name for kind, name in names if kind == "URI")
        if not identities:
            raise SecurityError(
                "the other side's certificate is for no task; issue one by `dflow certs issue DIR --name ...`"
            )
        if not is_server:
            _require_host(address, [name for kind, name in names if kind in ("DNS", "IP Address")])
        return Secured(stream, " ".join(identity.uri for identity in identities))


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
