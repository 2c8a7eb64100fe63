"""TLS 1.3 over a socket, for one thread that receives while another sends.

Why not `ssl.SSLSocket`: two threads must not be inside one OpenSSL connection, and a waiting receive would block all
sends. So OpenSSL works on memory buffers here, under a lock that is never held while waiting, and the socket is read
and written outside of that lock.

Invariants: the ciphertext from OpenSSL is sent completely and in order. If the socket accepts only part of a chunk, the
chunk's plaintext counts as not sent. The next `send` must then begin with the same bytes (as `SendQueue`
does); it sends the rest of the ciphertext, and skips that plaintext. At most one chunk is buffered each way.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dflow.distributed.transport.stream import Deadline, Parts, Stream, without
from dflow.tracing.errors import DeadlineExceeded, SecurityError, TransportClosed

#: Size of a chunk: the most plaintext encrypted before a send, and ciphertext received before a decryption.
CHUNK_BYTES = 1 << 18
#: Most bytes of a handshake accepted from the other side; two certificates and their keys are under 4 KiB.
MAX_HANDSHAKE_BYTES = 1 << 15


def tls_context(protocol: int) -> ssl.SSLContext:
    """Return a context for TLS 1.3 without certificates; `protocol` is that of a server or a client."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # policies check hosts and names
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


class TlsStream(Stream):
    """The connection `sock` under `context`; call `shake_hands` first.

    As a plain stream it may end without a TLS close: the last frame tells the peer whether the close was clean.
    """

    may_hold_back = True

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        super().__init__(sock)
        self._timeout_s = 0.0
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._lock = threading.Lock()
        self._raw = bytearray()
        self._unsent = memoryview(b"")
        self._unsent_plain = 0

    def shake_hands(self, deadline: Deadline) -> None:
        """Agree on keys, and verify the other side's certificate as `context` is configured.

        raises  SecurityError when one side refuses the other; DeadlineExceeded; TransportClosed; OSError
        """
        received = 0
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush(deadline)
                with _within(self._sock, deadline):
                    data = self._sock.recv(MAX_HANDSHAKE_BYTES)
                if not data:
                    raise TransportClosed("the other side closed the connection during the TLS handshake") from None
                received += len(data)
                if received > MAX_HANDSHAKE_BYTES:
                    raise SecurityError(f"the TLS handshake takes more than {MAX_HANDSHAKE_BYTES} bytes") from None
                self._incoming.write(data)
            except ssl.SSLError as error:
                with contextlib.suppress(OSError, DeadlineExceeded):
                    self._flush(deadline)  # send the alert, which states the error to the other side
                raise refusal(error) from error
        self._flush(deadline)
        self._raw = bytearray(CHUNK_BYTES)

    def certificate(self) -> bytes:
        """Return the other side's certificate in DER; raises SecurityError if it showed none."""
        certificate = self._tls.getpeercert(binary_form=True)
        if certificate is None:
            raise SecurityError("the other side showed no certificate")
        return certificate

    def alternative_names(self) -> tuple[tuple[str, str], ...]:
        """Return the names in the other side's certificate as (kind, name); empty if it was not verified."""
        found: Any = (self._tls.getpeercert() or {}).get("subjectAltName", ())
        return tuple((kind, name) for kind, name in found)

    def send(self, parts: Sequence[memoryview], *, waits: bool = True) -> int:
        """Send some of `parts`; see `Stream.send`."""
        taken = 0
        if self._unsent:
            if not self._push(waits=waits):
                return 0
            taken = self._unsent_plain
        for chunk in _chunks(without(parts, taken)):
            with self._lock:
                for part in chunk:
                    self._tls.write(part)
                self._unsent = memoryview(self._outgoing.read())
            self._unsent_plain = sum(map(len, chunk))
            if not self._push(waits=waits):
                return taken
            taken += self._unsent_plain
        return taken

    def receive(self, view: memoryview, *, waits: bool = True) -> int:
        """Receive some bytes; see `Stream.receive`.

        raises  BlockingIOError if no complete record arrived within the time-out, even if some bytes did;
                SecurityError if a record was forged or corrupted, or the other side refused this one; OSError
        """
        patience_ends = 0.0
        while (count := self._decrypted(view)) is None:
            if waits:
                now = time.monotonic()
                patience_ends = patience_ends or now + self._timeout_s
                if now > patience_ends:
                    raise BlockingIOError(f"no whole TLS record came within {self._timeout_s:g} s")
            count = self._sock.recv_into(self._raw, 0, 0 if waits else socket.MSG_DONTWAIT)
            if not count:
                return 0
            with self._lock:
                self._incoming.write(memoryview(self._raw)[:count])
        return count

    def _decrypted(self, view: memoryview) -> int | None:
        """Decrypt into `view`; return the number of bytes, 0 at the end, None if no complete record has arrived."""
        try:
            with self._lock:
                return self._tls.read(len(view), view)  # type: ignore[return-value]
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLZeroReturnError:
            return 0
        except ssl.SSLError as error:
            raise refusal(error) from error

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time that `send` and `receive` may wait."""
        self._timeout_s = timeout_s
        super().set_timeout(timeout_s)

    def _push(self, *, waits: bool) -> bool:
        """Send the pending ciphertext; return whether all of it was sent."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent, 0 if waits else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[sent:]
        return True

    def _flush(self, deadline: Deadline) -> None:
        if data := self._outgoing.read():
            with _within(self._sock, deadline):
                self._sock.sendall(data)


def _chunks(parts: Iterable[memoryview]) -> Iterator[Parts]:
    """Cut `parts` into chunks of `CHUNK_BYTES`; each but the last is full, so that small parts share a packet."""
    chunk: Parts = []
    room = CHUNK_BYTES
    for part in parts:
        while part:
            chunk.append(part[:room])
            part = part[room:]
            room -= len(chunk[-1])
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def refusal(error: ssl.SSLError) -> SecurityError:
    """Return the error that explains a failure of TLS to the user."""
    reason = (getattr(error, "verify_message", "") or error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        return SecurityError(
            f"the other side's certificate is refused: {reason}; "
            "both need certificates that one authority issued by `dflow certs issue`, and clocks that agree"
        )
    if "alert" in reason:
        return SecurityError(f"the other side refused this one during TLS: {reason}; see its log for why")
    return SecurityError(
        f"what came is not the TLS 1.3 of the other side ({reason}); are both set up with the same kind of security, "
        "certificates or a shared secret?"
    )


@contextlib.contextmanager
def _within(sock: socket.socket, deadline: Deadline) -> Iterator[None]:
    """Limit the time of the calls on `sock`; raises DeadlineExceeded when it has passed."""
    sock.settimeout(deadline.left_s)
    try:
        if deadline.has_passed:
            raise TimeoutError
        yield
    except TimeoutError:
        raise DeadlineExceeded("the TLS handshake did not end in time") from None
