"""The name of a device, `/job:<job>/task:<index>/device:<platform>:<number>`, and the forms that people write.

A graph names where an op runs by a task, which runs it on its default device; by a device of a task; or by
`/device:cpu:1`, a device of whatever task calls the function. People write `cpu:1` for the last, and `ps:0/cpu:1` for
a device of a task. Names of platforms are no jobs, so that `cpu:1` is never a task.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from functools import lru_cache

from dflow.tracing.devices.platforms import PLATFORMS
from dflow.tracing.devices.task_name import full_task_name, short_task_name, split_task_name
from dflow.tracing.errors import DeviceError

_LOCAL = re.compile(rf"(?:/device:|/)?({'|'.join(PLATFORMS)}):([0-9]+)", re.IGNORECASE)
_WITH_TASK = re.compile(rf"(.+?[0-9])/(?:device:)?((?:{'|'.join(PLATFORMS)}):[0-9]+)", re.IGNORECASE)
_FULL = re.compile(r"(.*)/device:([a-z]+:[0-9]+)")
_FAMILY = {"cuda": "gpu", "rocm": "gpu"}


def full_device_name(name: str) -> str:
    """The full form of a name that a user wrote: `/device:cpu:1` of `cpu:1`, `/job:ps/task:0` of `ps:0`.

    `cuda` and `rocm` mean `gpu`; a platform's name may be in upper case. Raises DeviceError for any other text.
    """
    try:
        if found := _LOCAL.fullmatch(name):
            return device_name("", f"{found[1]}:{found[2]}")
        if found := _WITH_TASK.fullmatch(name):
            task, local = found.groups()
            return device_name(full_task_name(task), local)
        return full_task_name(name)
    except DeviceError:
        raise DeviceError(
            f"{name!r} is not the name of a device; write cpu:1, gpu:0 or tpu:2 for a device of this process, "
            "or ps:0 or /job:ps/task:0 for a task"
        ) from None


def device_name(task: str, local: str) -> str:
    """The full name of the device `local`, such as `cpu:1`, of `task`; an empty `task` means the caller's."""
    platform, _, number = local.lower().partition(":")
    return f"{task}/device:{_FAMILY.get(platform, platform)}:{int(number)}"


@lru_cache(maxsize=1024)
def split_device_name(device: str) -> tuple[str, str]:
    """The task and the device within it of a full name; either may be empty."""
    found = _FULL.fullmatch(device)
    return (found[1], found[2]) if found else (device, "")


def no_such_job(task: str, others: Collection[str]) -> str | None:
    """The first line of an error if `task` has a job that no task in `others` has; None if it may exist."""
    jobs = sorted({split_task_name(other)[0] for other in others}) if len(others) > 1 else []
    job, _ = split_task_name(task)
    near = get_close_matches(job, PLATFORMS, 1)
    if job in jobs or not (jobs or near):
        return None
    of_jobs = f" or a task of the cluster's jobs ({', '.join(jobs)})" if jobs else ""
    return f"expected a device such as '{near[0] if near else 'cpu'}:0'{of_jobs}, got {short_task_name(task)!r}"


def task_of(device: str) -> str:
    """The task of a full name; empty where it names a device of the caller's."""
    return split_device_name(device)[0]


def is_on_task(device: str | None) -> bool:
    """Whether a full name is that of a task, or of a device of one, rather than a device of the caller's."""
    return device is not None and device.startswith("/job:")


def short_device_name(device: str) -> str:
    """`/device:cpu:1` as `cpu:1`, `/job:ps/task:0/device:cpu:1` as `ps:0/cpu:1`, a task as `ps:0`."""
    task, local = split_device_name(device)
    return "/".join(part for part in (short_task_name(task), local) if part)
