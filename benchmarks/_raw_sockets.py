"""The bytes of a null step over plain TCP sockets: a lower bound for every runtime on sockets.

Each server is a process. For each worker it answers a request of `ask` bytes by `reply` bytes, then takes an update of
four bytes and acknowledges it; server 0 acknowledges once the updates of all workers have arrived, which is the
barrier.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
from collections.abc import Iterator, Sequence

UPDATE_BYTES = 4


@contextlib.contextmanager
def raw_servers(count: int, workers: int, ask: int, reply: int) -> Iterator[list[int]]:
    """Start `count` server processes and yield their ports; the processes end with the block."""
    context = multiprocessing.get_context("spawn")
    servers, ports = [], []
    for number in range(count):
        here, there = context.Pipe()
        waits = number == 0
        server = context.Process(target=_serve, args=(there, workers, ask, reply, waits), daemon=True)
        server.start()
        servers.append(server)
        ports.append(here.recv())
    try:
        yield ports
    finally:
        for server in servers:
            server.terminate()
            server.join()


class RawClient:
    """A worker's connections to the servers, with one buffer for all replies."""

    def __init__(self, ports: Sequence[int], ask: int, reply: int) -> None:
        self._socks = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ask = bytes(ask)
        self._replies = [memoryview(bytearray(reply)) for _ in ports]

    def step(self) -> None:
        """Fetch from every server, then update every server."""
        for sock in self._socks:
            sock.sendall(self._ask)
        for sock, reply in zip(self._socks, self._replies, strict=True):
            receive(sock, reply)
        for sock in self._socks:
            sock.sendall(bytes(UPDATE_BYTES))
        for sock in self._socks:
            receive(sock, memoryview(bytearray(1)))

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


def receive(sock: socket.socket, view: memoryview) -> bool:
    """Fill `view`; return False if the peer has closed the connection."""
    got = 0
    while got < len(view):
        count = sock.recv_into(view[got:])
        if not count:
            return False
        got += count
    return True


def _serve(pipe: multiprocessing.connection.Connection, workers: int, ask: int, reply: int, waits: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    data = bytes(reply)
    barrier = threading.Barrier(workers)

    def serve(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked, update = memoryview(bytearray(ask)), memoryview(bytearray(UPDATE_BYTES))
        with sock, contextlib.suppress(OSError):
            while receive(sock, asked):
                sock.sendall(data)
                receive(sock, update)
                if waits:
                    barrier.wait()
                sock.sendall(b"1")

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()
