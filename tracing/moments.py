"""Named moments that a process reaches, so that a test of faults can kill or pause a process exactly there.

Nothing happens at a moment unless a test has set `hook`. Otherwise a moment costs one comparison, and no moment is on
the path of every step.
"""

from __future__ import annotations

from collections.abc import Callable

#: The moments, and the roles that reach each.
ROLES = {
    # A variable is created: before it is sent, and before it is made.
    "creation": ("worker", "ps"),
    # A function is called for the first time, or for arguments of other types, and is not traced yet.
    "first call": ("worker",),
    "new trace": ("worker",),
    # A plan is registered with a task: before it is sent, and before it is added.
    "registration": ("worker", "ps"),
    # A snapshot: before tasks are asked, and before a task captures; before a task writes what it captured; before the
    # record of the snapshot, and before a task removes older parts.
    "capture": ("coordinator", "ps"),
    "write": ("ps",),
    "commit": ("coordinator", "ps"),
    # A return to a snapshot: before tasks are asked, and before a task reads or sets.
    "restore": ("coordinator", "ps"),
    # Within the pause of all steps for a checkpoint or an evaluation.
    "pause": ("worker",),
    # A checkpoint: before tasks are asked, and before a task writes.
    "save": ("worker", "ps"),
    # Before the files of an export are written.
    "export": ("worker",),
}

#: Called with a moment, and with the task or role that reaches it; empty where the code knows no task.
hook: Callable[[str, str], None] | None = None


def reach(moment: str, task: str = "") -> None:
    """Note that this process, as the task or role `task`, reaches a moment."""
    if hook is not None:
        hook(moment, task)
