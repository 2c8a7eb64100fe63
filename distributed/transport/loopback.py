"""The address of this machine's loopback interface."""

from __future__ import annotations

import socket
from contextlib import suppress


def loopback(v4: str = "127.0.0.1", v6: str = "::1") -> str:
    """Return `v4`, or `v6` on a machine whose loopback interface has that address alone."""
    with suppress(OSError), socket.socket(socket.AF_INET) as tried:
        tried.bind((v4, 0))
        return v4
    with suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind((v6, 0))
        return v6
    return v4


LOOPBACK = loopback()
