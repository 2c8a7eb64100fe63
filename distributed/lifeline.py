"""Ending a process when the one that launched it has ended, however that came about.

The launcher holds the write end of a pipe and says nothing; each child gets the read end, whose number stands in
`DFLOW_LIFELINE_FD`. The system closes the write end when the launcher ends, even by SIGKILL, and the read end
then reports it. Invariant: nothing is ever written to the pipe.
"""

from __future__ import annotations

import os
import threading

LIFELINE_VARIABLE = "DFLOW_LIFELINE_FD"
#: Exit status of a process whose launcher has ended.
ORPHANED = 70


def watch() -> bool:
    """End this process at once, by `os._exit`, when its launcher ends; returns whether a launcher is watched.

    Without a launcher, and when called again, this does nothing. The variable is taken out of the environment, as
    the processes that this one starts do not have the pipe.
    """
    number = os.environ.pop(LIFELINE_VARIABLE, "")
    if not number.isdigit():
        return False
    threading.Thread(target=_end_with, args=(int(number),), name="dflow lifeline", daemon=True).start()
    return True


def _end_with(read_end: int) -> None:
    try:
        os.set_inheritable(read_end, False)
        os.read(read_end, 1)
    except OSError:
        return  # the number names no pipe here, so there is nobody to outlive
    os._exit(ORPHANED)
