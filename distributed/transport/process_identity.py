"""Identities of this process and this machine, which another process can check.

Why: a broken connection is resumed only with the same process, and not awaited if that process has ended. Two processes
on one machine find out both immediately.

An identity is text, meaningless to processes of other machines. It is empty on systems other than Linux, which do not
provide it; its users are then slower, but still correct.
"""

from __future__ import annotations

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Return the identity of this machine's boot and this user; equal for processes that may share memory.

    The number of a user means nothing in another user namespace, such as that of a rootless container.
    """
    boot = _boot()
    try:
        return f"{boot}/{os.stat('/proc/self/ns/user').st_ino}/{os.geteuid()}" if boot else ""
    except OSError:
        return ""


def process_identity() -> str:
    """Return the identity of this process."""
    try:
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
        return f"{_boot()}/{pid_namespace}/{os.getpid()}/{_state(os.getpid())[1]}"
    except OSError:
        return ""


def has_ended(identity: str) -> bool:
    """Whether the process has ended; False if it is not visible here, as on another machine or in another container."""
    known, own = identity.split("/"), process_identity().split("/")
    if len(known) != 4 or known[:2] != own[:2] or not known[2].isdecimal():
        return False
    try:
        state, start = _state(int(known[2]))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return start != known[3] or state in "ZX"


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str]:
    """Return the state of a process, and its start time, which tells it from a later process with the same PID."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
