"""The limit of open files of this process, which bounds the connections that a server may hold."""

from __future__ import annotations

import contextlib
import resource

#: File descriptors that a process needs besides its connections.
OTHER_FILES = 64
#: The limit to set. It is no higher because some child programs visit every descriptor below their limit.
_ENOUGH_FILES = 1 << 16


def raise_open_files() -> int:
    """Raise this process's limit of open files as far as allowed, at most to `_ENOUGH_FILES`; return the new limit.

    Many systems start a process with a limit of 1,024 files, although it may raise that far higher.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if most == resource.RLIM_INFINITY else min(_ENOUGH_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH_FILES if limit == resource.RLIM_INFINITY else limit
