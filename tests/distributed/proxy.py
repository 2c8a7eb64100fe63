"""A proxy between two tasks that cuts their connections at any byte, or holds the bytes back, on request."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

from dflow.distributed.transport.addresses import TcpAddress, parse_address


class Proxy:
    """Forwards bytes to `address`; each connection is cut after a number of bytes from `draw`."""

    def __init__(self, address: str, draw: random.Random, *, most_bytes: int) -> None:
        self.turn_to(address)
        self._draw = draw
        self._most_bytes = most_bytes
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.connections = 0
        self.cuts_at_once = False
        #: Cleared to hold all bytes back.
        self.passes = threading.Event()
        self.passes.set()
        threading.Thread(target=self._accept_all, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def turn_to(self, address: str) -> None:
        target = parse_address(address)
        assert isinstance(target, TcpAddress)
        self._target = target

    def cut(self) -> None:
        with self._lock:
            for sock in self._open:
                _cut(sock)
            self._open.clear()

    def close(self) -> None:
        self.passes.set()
        _cut(self._listening)
        self._listening.close()
        self.cut()

    def _accept_all(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if self.cuts_at_once:
                    near.close()
                    continue
                try:
                    far = socket.create_connection((self._target.host, self._target.port))
                except ConnectionRefusedError:
                    near.close()
                    continue
                self.connections += 1
                with self._lock:
                    self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        left = self._draw.randint(1, self._most_bytes)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.passes.wait()
                if len(data) >= left:
                    sink.sendall(data[:left])
                    break
                left -= len(data)
                sink.sendall(data)
        _cut(source)
        _cut(sink)
        source.close()


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
