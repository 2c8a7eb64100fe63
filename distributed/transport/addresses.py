"""Addresses of tasks, as text and as values.

Why: code outside the transport passes addresses on as text; this file alone parses them. An address is `host:port`,
`[host]:port` for IPv6, or `unix:/path`. `unix:` without a path listens at a new path, in a folder that only this user
can enter. `host:port;unix:/path@identity` gives two addresses of one listener: the second is faster, and is for
processes of the machine and user with that identity.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from dflow.distributed.transport.loopback import LOOPBACK

#: Longest path in Linux's `sockaddr_un`, without its terminating zero.
MAX_UNIX_PATH_BYTES = 107

_UNIX = "unix:"


@dataclass(frozen=True)
class TcpAddress:
    """A host, by number or name, and a port; port 0 listens on a free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether this address reaches only this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


#: The address to listen at for a task that only tasks of this machine must reach.
LOCAL_ADDRESS = f"{TcpAddress(LOOPBACK, 0)};unix:"


@dataclass(frozen=True)
class UnixAddress:
    """A socket in the file system; an empty path listens in a new folder."""

    path: str

    def __str__(self) -> str:
        return _UNIX + self.path


Address = TcpAddress | UnixAddress


@dataclass(frozen=True)
class Endpoints:
    """The addresses of a listener: `main`, and optionally `near` for processes whose host identity is `identity`."""

    main: Address
    near: UnixAddress | None = None
    identity: str = ""

    def __str__(self) -> str:
        if self.near is None:
            return str(self.main)
        return f"{self.main};{self.near}" + (f"@{self.identity}" if self.identity else "")


def parse_endpoints(text: str) -> Endpoints:
    """Parse one address or two; raises ValueError if `text` is malformed."""
    main, semicolon, near = text.partition(";")
    if not semicolon:
        return Endpoints(parse_address(main))
    path, _, identity = near.partition("@")
    address = parse_address(path)
    if not isinstance(address, UnixAddress):
        raise ValueError(f"the second way of address {text!r} is not of the form 'unix:/path@identity'")
    return Endpoints(parse_address(main), address, identity)


def parse_address(text: str) -> Address:
    """Parse one address; raises ValueError if `text` is malformed."""
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX)
        size_bytes = len(os.fsencode(path))
        if size_bytes > MAX_UNIX_PATH_BYTES:
            raise ValueError(
                f"the path of a Unix socket takes at most {MAX_UNIX_PATH_BYTES} bytes but {path!r} takes {size_bytes}; "
                "use a shorter one"
            )
        if path and not os.path.isabs(path):
            raise ValueError(f"the path of a Unix socket starts with '/' but this is {path!r}")
        return UnixAddress(path)
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"address {text!r} is not of the form 'host:port', such as '127.0.0.1:4321', or 'unix:/path'")
    host = host.removeprefix("[").removesuffix("]")
    return TcpAddress(LOOPBACK if host == "localhost" else host, int(port))
