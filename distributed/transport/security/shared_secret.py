"""The policy of a shared secret, proved inside TLS.

Why no secret without TLS: a proof at the start does not protect the later messages, which an attacker on the path could
read and change. So the listener creates a self-signed certificate at its start, and the proof of the secret covers that
certificate; see `challenge`. An unauthenticated peer gets only a certificate and a nonce.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import ssl
import tempfile
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dflow.distributed.transport.addresses import Address, TcpAddress
from dflow.distributed.transport.security.certificates import self_signed
from dflow.distributed.transport.security.challenge import MESSAGE_BYTES, MIN_SECRET_BYTES, challenge
from dflow.distributed.transport.security.policy import Secured, SecurityPolicy
from dflow.distributed.transport.security.private_files import read_private
from dflow.distributed.transport.security.tls_stream import TlsStream, tls_context
from dflow.distributed.transport.stream import Deadline, receive_by, send_by
from dflow.tracing.errors import SecurityError

#: Validity of a self-signed certificate, which peers do not check.
_EPHEMERAL = timedelta(days=3650)
_LATE = "the challenge by the shared secret did not end in time"
_CLOSED = (
    "the other side closed the connection during the challenge; see its log for why: does it know the same shared "
    "secret?"
)


class SharedSecret(SecurityPolicy):
    """Both sides prove that they know the secret in `file`; a peer may then use any name.

    A process that listens needs the package `cryptography`.

    raises  SecurityError when other users may read the file, or the secret is too short; OSError when the file cannot
            be read
    """

    def __init__(self, file: Path) -> None:
        self._secret = read_private(file).strip()
        if len(self._secret) < MIN_SECRET_BYTES:
            raise SecurityError(
                f"the shared secret has {len(self._secret)} bytes and needs {MIN_SECRET_BYTES}; "
                "make one by `dflow certs secret FILE`"
            )
        self._client = tls_context(ssl.PROTOCOL_TLS_CLIENT)
        # Only the proof authenticates the listener's certificate, by covering it.
        self._client.verify_mode = ssl.CERT_NONE
        self._lock = threading.Lock()
        self._server: ssl.SSLContext | None = None
        #: In DER.
        self._server_certificate = b""

    def check_address(self, address: Address, *, listens: bool) -> None:
        """Raise ConfigError if a TCP address is to be listened on without `cryptography`."""
        if listens and isinstance(address, TcpAddress):
            self.browser_context()

    def secure_tcp(self, sock: socket.socket, address: TcpAddress, deadline: Deadline, *, is_server: bool) -> Secured:
        """Shake hands and exchange proofs."""
        context = self.browser_context() if is_server else self._client
        stream = TlsStream(sock, context, is_server=is_server)
        stream.shake_hands(deadline)
        certificate = self._server_certificate if is_server else stream.certificate()
        challenge(
            self._secret,
            secrets.token_bytes(MESSAGE_BYTES),
            hashlib.sha256(certificate).digest(),
            is_listener=is_server,
            send=lambda message: send_by(stream, [memoryview(message)], deadline, _LATE),
            receive=lambda: bytes(receive_by(stream, MESSAGE_BYTES, deadline, late=_LATE, closed=_CLOSED)),
        )
        return Secured(stream, "")

    def browser_context(self) -> ssl.SSLContext:
        """Return the context of listeners, for peers and browsers, which warn about its certificate.

        The first call makes it and its certificate.
        """
        with self._lock:
            if self._server is None:
                pair = self_signed(datetime.now(UTC), _EPHEMERAL)
                context = tls_context(ssl.PROTOCOL_TLS_SERVER)
                # Python reads keys from files only; this folder is accessible to this user only.
                with tempfile.TemporaryDirectory(prefix="dflow-") as folder:
                    files = Path(folder, "certificate"), Path(folder, "key")
                    files[0].write_bytes(pair.certificate)
                    files[1].write_bytes(pair.key)
                    context.load_cert_chain(*files)
                self._server_certificate = ssl.PEM_cert_to_DER_cert(pair.certificate.decode())
                self._server = context
            return self._server
