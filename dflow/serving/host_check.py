"""Is a request's `Host` a name of this server?

Why: an attacker may point a name of theirs at this address (DNS rebinding). Then a browser takes their page for a page
of this server, and lets it send requests and read the answers; but `Host` is still the attacker's name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

LOCAL_NAMES = frozenset({"localhost"})


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Return whether the value of `Host` is an IP address or one of the names, which are in lower case."""
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name.removesuffix(".") in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
