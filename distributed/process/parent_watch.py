"""Parent watch: it ends a process when its launcher has ended for any reason.

The launcher holds the write end of a pipe and never writes to it. Each child inherits the read end, whose number is in
`DFLOW_LIFELINE_FD`. The system closes the write end when the launcher ends, even by SIGKILL, and the read end
then reports it. Invariant: nothing is ever written to the pipe.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress

LIFELINE_VARIABLE = "DFLOW_LIFELINE_FD"
#: Exit status of a process whose launcher has ended.
ORPHANED = 70


def watch() -> bool:
    """Start a thread that ends this process by `os._exit` when its launcher ends; return whether there is a launcher.

    Without a launcher, or when called again, this does nothing. It removes `DFLOW_LIFELINE_FD` from the environment,
    since processes started by this one do not inherit the pipe.
    """
    number = os.environ.pop(LIFELINE_VARIABLE, "")
    if not number.isdigit():
        return False
    threading.Thread(target=_end_with, args=(int(number),), name="dflow lifeline", daemon=True).start()
    return True


def end_with_parent() -> None:
    """Start a thread that ends this process by `os._exit` when its present parent ends, which has no pipe for it."""
    threading.Thread(target=_end_after, args=(os.getppid(),), name="dflow parent watch", daemon=True).start()


def wait_until_ended(pid: int) -> None:
    """Wait without a deadline until the process has ended; raises ProcessLookupError if there is none."""
    with os.fdopen(os.pidfd_open(pid)) as ended:
        poll = select.poll()  # unlike select, it accepts any descriptor number
        poll.register(ended, select.POLLIN)
        poll.poll()


def _end_after(pid: int) -> None:
    with suppress(ProcessLookupError):
        wait_until_ended(pid)
    os._exit(ORPHANED)


def _end_with(read_end: int) -> None:
    try:
        os.set_inheritable(read_end, False)
        os.read(read_end, 1)
    except OSError:
        return  # the number is not a pipe of this process, so there is no launcher to watch
    os._exit(ORPHANED)
