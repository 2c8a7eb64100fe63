"""The kinds of sockets, TCP and Unix: listening and connecting, which is all that differs between them."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from dflow.distributed.transport.addresses import Address, TcpAddress, UnixAddress

#: Most connections that may wait to be accepted; the system may lower it.
_BACKLOG = 1024

_FOLDER, _SOCKET = "dflow-task-", "socket"

#: Least age of a folder to remove, in seconds: a process may be about to listen in a younger one.
_LEFT_AFTER_S = 60.0


class BoundSocket(NamedTuple):
    """A listening socket, its address, and the folder that was made for it, if any."""

    sock: socket.socket
    address: Address
    folder: str = ""

    def close(self) -> None:
        """Stop listening, wake the thread that accepts, and remove the socket's file and folder."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        if isinstance(self.address, UnixAddress):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.path)
        if self.folder:
            os.rmdir(self.folder)


def bind(address: Address) -> BoundSocket:
    """Listen at `address`; raises OSError if it is taken."""
    return _bind_unix(address) if isinstance(address, UnixAddress) else _bind_tcp(address)


def dial(address: Address, timeout_s: float) -> socket.socket:
    """Return a connected socket to `address`; raises OSError."""
    if isinstance(address, UnixAddress):
        with contextlib.ExitStack() as failed:
            sock = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(timeout_s)
            sock.connect(address.path)
            failed.pop_all()
        return sock
    sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
    if sock.getsockname() == sock.getpeername():
        sock.close()
        raise ConnectionRefusedError("nothing listens there (the port was free, and connected to itself)")
    _send_immediately(sock)
    return sock


def _bind_tcp(address: TcpAddress) -> BoundSocket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    _send_immediately(sock)  # accepted sockets inherit this
    host, port = sock.getsockname()[:2]
    return BoundSocket(sock, TcpAddress(host, port))


def _send_immediately(sock: socket.socket) -> None:
    """Send small frames immediately, instead of waiting to merge them."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _bind_unix(address: UnixAddress) -> BoundSocket:
    folder = "" if address.path else _new_folder()
    path = address.path or os.path.join(folder, _SOCKET)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_if_dead(path)
        sock.bind(path)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return BoundSocket(sock, UnixAddress(path), folder)


def _new_folder() -> str:
    """Create a folder that only this user can enter, after removing the folders left by killed processes."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            about = left.stat()
            if about.st_uid == os.geteuid() and time.time() - about.st_mtime > _LEFT_AFTER_S:
                _remove_if_dead(str(left / _SOCKET))
                left.rmdir()
    return tempfile.mkdtemp(prefix=_FOLDER)


def _remove_if_dead(path: str) -> None:
    """Remove the socket file at `path` if no process listens on it any more.

    The test connects by a socket of another type, which a living listener does not notice. The system refuses it either
    for its type, or with ECONNREFUSED because no process listens.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            pass
