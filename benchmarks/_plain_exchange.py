"""The bytes of a step over plain sockets: a server that takes and returns as many bytes as it is asked to.

A request is a header with two sizes, then as many bytes as the first says; the answer has as many as the second.
`python -m benchmarks._plain_exchange ADDRESS` serves plain TCP at `PORT`, and TLS 1.3 at `TLS_PORT`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks._raw_sockets import receive
from dflow.distributed.transport.security.certificates import self_signed

PORT, TLS_PORT = 7700, 7701
CONNECT_S = 60.0

_SIZES = struct.Struct("<QQ")


class PlainClient:
    """Connections to the servers at `addresses`, under TLS if `port` is `TLS_PORT`."""

    def __init__(self, addresses: Sequence[str], port: int = PORT) -> None:
        self._socks = [_connected(address, port) for address in addresses]
        self._buffer = memoryview(b"")

    def exchange(self, up_bytes: int, down_bytes: int) -> None:
        """Send `up_bytes` in all, a part to each server, and receive `down_bytes` from them."""
        up, down = (size // len(self._socks) for size in (up_bytes, down_bytes))
        if len(self._buffer) < max(up, down):
            self._buffer = memoryview(bytearray(max(up, down)))
        for sock in self._socks:
            sock.sendall(_SIZES.pack(up, down))
            if up:
                sock.sendall(self._buffer[:up])
        for sock in self._socks:
            receive(sock, self._buffer[:down])

    def step(self, size_bytes: int) -> None:
        """Do as a training step does: get the values, then send the gradients, until they have arrived."""
        self.exchange(0, size_bytes)
        self.exchange(size_bytes, len(self._socks))


def _connected(address: str, port: int) -> socket.socket:
    ends = time.monotonic() + CONNECT_S
    while True:
        try:
            sock = socket.create_connection((address, port), timeout=CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if port == PORT:
            return sock
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context.wrap_socket(sock)


def main() -> None:
    address = sys.argv[1]
    threading.Thread(target=_accept_all, args=(address, TLS_PORT, _server_context()), daemon=True).start()
    _accept_all(address, PORT, None)


def _server_context() -> ssl.SSLContext:
    pair = self_signed(datetime.now(UTC), timedelta(days=1))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "certificate"), Path(folder, "key")
        files[0].write_bytes(pair.certificate)
        files[1].write_bytes(pair.key)
        context.load_cert_chain(*files)
    return context


def _accept_all(address: str, port: int, context: ssl.SSLContext | None) -> None:
    listener = socket.create_server((address, port))
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve, args=(sock, context), daemon=True).start()


def _serve(sock: socket.socket, context: ssl.SSLContext | None) -> None:
    header, buffer = memoryview(bytearray(_SIZES.size)), memoryview(b"")
    with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) if context else sock as stream:
        while receive(stream, header):
            up, down = _SIZES.unpack(header)
            if len(buffer) < max(up, down):
                buffer = memoryview(bytearray(max(up, down)))
            receive(stream, buffer[:up])
            stream.sendall(buffer[:down])


if __name__ == "__main__":
    main()
