"""Connections of another process, broken from outside, whatever they connect (Linux)."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

#: `pidfd_getfd(2)`, which Python does not wrap; one number on all architectures, since Linux 5.6.
_PIDFD_GETFD = 438

_libc = ctypes.CDLL(None, use_errno=True)


def break_connections(pid: int, pidfd: int) -> int:
    """Shut down all connected sockets of a process, at both ends; return their number, 0 if the process has ended.

    Raises PermissionError where the system does not let a parent look into its children.
    """
    count = 0
    with suppress(FileNotFoundError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            count += _shut_down(link, pidfd)
    return count


def _shut_down(link: Path, pidfd: int) -> bool:
    """Shut down the socket of this descriptor; return whether it is a connected one with a name."""
    try:
        if not os.readlink(link).startswith("socket:"):
            return False
        taken = _libc.syscall(_PIDFD_GETFD, pidfd, int(link.name), 0)
        if taken < 0:
            raise OSError(ctypes.get_errno(), f"pidfd_getfd of {link}")
        with socket.socket(fileno=taken) as one:
            # A pair of sockets within the process has no names.
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or not (one.getsockname() or one.getpeername()):
                return False
            one.shutdown(socket.SHUT_RDWR)
    except PermissionError:
        raise
    except OSError:  # it was closed meanwhile
        return False
    return True
