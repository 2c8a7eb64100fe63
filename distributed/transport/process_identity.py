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
    """Return the identity of this machine's boot and this user; equal for processes that may share memory."""
    boot = _boot()
    return f"{boot}/{os.geteuid()}" if boot else ""


def process_identity() -> str:
    """Return the identity of this process."""
    try:
        return f"{_boot()}/{_pid_namespace()}/{os.getpid()}/{_started(os.getpid())}"
    except OSError:
        return ""


def open_process(identity: str) -> int | None:
    """Return a file descriptor, for the caller to close, that becomes readable when the process ends.

    It is None if the process is not visible here, as on another machine or in another container.

    raises  ProcessLookupError if the process has ended
    """
    boot, _, rest = identity.partition("/")
    namespace, _, rest = rest.partition("/")
    pid, _, started = rest.partition("/")
    try:
        if not (boot and boot == _boot() and namespace == _pid_namespace() and pid.isascii() and pid.isdigit()):
            return None
        descriptor = os.pidfd_open(int(pid))
    except (ProcessLookupError, FileNotFoundError):
        raise ProcessLookupError(f"process {pid} has ended") from None
    except OSError:
        return None
    try:
        if _started(int(pid)) == started:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    raise ProcessLookupError(f"process {pid} has ended")


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _started(pid: int) -> str:
    """Return the start time of the process, which tells it from a later process with the same PID."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
