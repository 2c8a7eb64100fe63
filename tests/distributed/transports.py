"""Handlers and addresses for the tests of transports. Each of their waits has a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dflow.distributed.transport.base import Handler, Listener, Peer, Responder, Transport
from dflow.distributed.transport.framing import pack_header
from dflow.distributed.transport.link import Frame, Limits
from dflow.distributed.transport.link import Kind as FrameKind
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.transport.security.certificates import issue_certificate, make_authority
from dflow.distributed.transport.security.identity import Identity
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.codec import encode_message
from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.distributed.wire.messages.message import Message

DEADLINE_S = 30.0


@dataclass(frozen=True)
class Kind:
    """A transport to test, and a free address for it."""

    make: Callable[[Limits | None], Transport]
    free: str
    nobody: str


@functools.cache
def certificates() -> MutualTls:
    """A policy with a certificate for all names in tests of transports, by a new authority."""
    now, day = datetime.now(UTC), timedelta(days=1)
    authority = make_authority("tests", now, 2 * day)
    names = ("server", "client", "me", "one", "two", "late", "ps", "coordinator", "worker", "chief", "status")
    pair = issue_certificate(authority, [Identity(name) for name in names], (), now, day)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in (("cert", pair.certificate), ("key", pair.key), ("ca", authority.certificate)):
            path = Path(folder, f"{name}.pem")
            path.write_bytes(data)
            path.chmod(0o600)
        return MutualTls.in_folder(Path(folder))


def without_shared_memory(limits: Limits | None) -> SocketTransport:
    """Sockets that carry large payloads too."""
    return SocketTransport(dataclasses.replace(limits or Limits(), shared_bytes=0))


KINDS = {
    "memory": Kind(MemoryNetwork, free="", nobody="nowhere"),
    "tcp": Kind(SocketTransport, free="127.0.0.1:0", nobody="127.0.0.1:1"),
    "tls": Kind(lambda limits: SocketTransport(limits, certificates()), free="127.0.0.1:0", nobody="127.0.0.1:1"),
    "unix": Kind(without_shared_memory, free="unix:", nobody="unix:/nowhere"),
    "shared memory": Kind(SocketTransport, free="unix:", nobody="unix:/nowhere"),
    "task": Kind(SocketTransport, free="127.0.0.1:0;unix:", nobody="127.0.0.1:1;unix:/nowhere@nobody"),
}


class Recorder(Handler):
    """Keeps what arrives; answers requests by the given function, on the reader thread."""

    def __init__(self, answer: Callable[[Peer, Message, memoryview, Responder], None] | None = None) -> None:
        self._answer = answer or (lambda peer, message, payload, responder: responder.reply(Ok()))
        self.notices: queue.SimpleQueue[tuple[Message, bytes]] = queue.SimpleQueue()
        self.closed: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def on_call(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        self._answer(peer, message, payload, responder)

    def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
        if isinstance(message, Failure):
            raise ValueError(message.text)
        self.notices.put((message, bytes(payload)))

    def on_close(self, peer: Peer, reason: str) -> None:
        self.closed.put((peer.name, reason))

    def notice(self) -> tuple[Message, bytes]:
        return self.notices.get(timeout=DEADLINE_S)

    def close_reason(self) -> str:
        return self.closed.get(timeout=DEADLINE_S)[1]


def echo(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
    responder.reply(message, payload)


def hold(event: threading.Event) -> Callable[[Peer, Message, memoryview, Responder], None]:
    """Never answer; set `event` at a request."""

    def answer(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        event.set()

    return answer


def reach(transport: Transport, address: str, handler: Handler, name: str = "client") -> Peer:
    return transport.connect(address, name=name, handler=handler, who="server", timeout_s=DEADLINE_S)


def own_address() -> str:
    """An address of this machine that is not loopback; nothing is sent for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        host: str = sock.getsockname()[0]
    return host


# Plain sockets to a listener, for what no peer of ours sends.


def frame(
    message: Message, payload: bytes = b"", kind: FrameKind = FrameKind.NOTIFY, number: int = 0, sequence: int = 0
) -> bytes:
    """Return the bytes of a frame."""
    meta = encode_message(message)
    return pack_header(Frame(kind, number, meta, payload), sequence=sequence) + meta + payload


def dial_raw(listener: Listener, said: bytes = b"") -> socket.socket:
    """Return a connected socket to a listener at a TCP address, over which these bytes were sent."""
    host, port = listener.address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    sock.sendall(said)
    return sock


def read_until_closed(sock: socket.socket) -> bytes:
    """Return what the other side sends until it closes; fails at the socket's deadline if it does not close."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            data += part
    return data


def still_serves(listener: Listener, security: SecurityPolicy | None = None) -> bool:
    """Whether a listener that echoes answers a new peer."""
    peer = reach(SocketTransport(security=security), listener.address, Recorder())
    try:
        return peer.call(Ok(), b"abc", timeout_s=DEADLINE_S).payload == b"abc"
    finally:
        peer.close()
