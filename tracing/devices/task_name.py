"""The name of a task, `/job:<job>/task:<index>`, and its short form `<job>:<index>` for people.

The full name is what messages, plans and devices hold; the short one appears in prefixes, tables and errors, and may
be written wherever a user names a task.
"""

from __future__ import annotations

import re

from dflow.tracing.devices.platforms import PLATFORMS
from dflow.tracing.errors import DeviceError

_FULL = re.compile(r"/job:([A-Za-z][A-Za-z0-9_]*)/task:([0-9]+)")
_SHORT = re.compile(r"([A-Za-z][A-Za-z0-9_]*):([0-9]+)")


def task_name(job: str, index: int) -> str:
    """The full name of task number `index` of `job`; raises DeviceError when `job` cannot stand in a name."""
    name = f"/job:{job}/task:{index}"
    split_task_name(name)
    if job.lower() in PLATFORMS:
        raise DeviceError(f"{job!r} is a platform, so {job}:{index} is a device, not a task; call the job otherwise")
    return name


def split_task_name(task: str) -> tuple[str, int]:
    """The job and the index of a full task name; raises DeviceError when it is not one."""
    found = _FULL.fullmatch(task)
    if found is None:
        raise DeviceError(f"{task!r} is not the name of a task; write /job:<job>/task:<index>, such as /job:ps/task:0")
    return found[1], int(found[2])


def full_task_name(name: str) -> str:
    """The full form of a name that a user wrote in either form; raises DeviceError when it is neither."""
    found = _SHORT.fullmatch(name)
    full = f"/job:{found[1]}/task:{int(found[2])}" if found else name
    split_task_name(full)
    return full


def short_task_name(task: str) -> str:
    """`/job:worker/task:0` as `worker:0`; anything else as it is."""
    found = _FULL.fullmatch(task)
    return f"{found[1]}:{int(found[2])}" if found else task
