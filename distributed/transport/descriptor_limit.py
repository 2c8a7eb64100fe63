"""The limit of open files and sockets of this process, raised as far as the system allows.

Why: a coordinator or a task server has a connection from every task of the cluster, and many systems start a process
with a limit of 1,024 files although it may raise that far higher.
"""

from __future__ import annotations

import contextlib
import resource

#: The limit to set. It is no higher because some child programs visit every descriptor below their limit.
ENOUGH = 1 << 16


def raise_descriptor_limit() -> int:
    """Raise the limit of this process to `ENOUGH`, or as far as allowed; return the resulting limit."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if most == resource.RLIM_INFINITY else min(ENOUGH, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if limit == resource.RLIM_INFINITY else limit
