"""The number of files and sockets that this process may have open, raised as far as the system lets it.

Why: a coordinator or a stock task has a connection from every task of the cluster, and many systems start a process
with room for 1,024 files though it may ask for far more.
"""

from __future__ import annotations

import contextlib
import resource

#: The limit that is asked for. No more: some child programs visit every number below their limit.
ENOUGH = 1 << 16


def raise_descriptor_limit() -> int:
    """Raise the limit of this process to `ENOUGH`, or as far as allowed; the limit that now holds."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if most == resource.RLIM_INFINITY else min(ENOUGH, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if limit == resource.RLIM_INFINITY else limit
