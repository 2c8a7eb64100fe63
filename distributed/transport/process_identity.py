"""Which process and which machine this is, in a form that another process can check.

Why: a connection that broke is resumed only with the same process, and one whose process has died need not be waited
for. Both are known at once where the two share a machine.

An identity is text that says nothing to a process of another machine. Identities are empty where the system does not
tell (only Linux does); what depends on them is then slower and not wrong.
"""

from __future__ import annotations

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """This machine since its start, and this user; equal for processes that may share sockets and memory."""
    boot = _boot()
    return f"{boot}/{os.geteuid()}" if boot else ""


def process_identity() -> str:
    """This process."""
    try:
        return f"{_boot()}/{_pid_namespace()}/{os.getpid()}/{_started(os.getpid())}"
    except OSError:
        return ""


def open_process(identity: str) -> int | None:
    """A file number that becomes readable when the process ends, for the caller to close; None if it cannot be seen.

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
    """When the process started, so that its number given to another is not mistaken for it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
