"""The names of places: `/job:<job>/task:<index>`, and the short form `<job>:<index>` for people.

A device in a graph is such a name, or `WITH_STATE`, which asks placement to put an op where the state it updates
lives. A scope (`with device(...)`) reaches an op through JAX's own trace context, so that the ops of a gradient
take the device of the op they come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from jax.experimental.xla_metadata import set_xla_metadata

from dflow.tracing.errors import DeviceError
from dflow.tracing.source import at, caller

#: The key under which a device scope travels in JAX's trace context.
METADATA_KEY = "dflow_device"

#: The placement of an op that belongs to an update: it goes where the variables that it feeds live.
WITH_STATE = "with-state"

_LONG = re.compile(r"/job:([a-z_][a-z0-9_]*)/task:(\d+)$")
_SHORT = re.compile(r"([a-z_][a-z0-9_]*):(\d+)$")


def canonical(name: str) -> str:
    """The long form of a task's name. Raises DeviceError when it is none."""
    match = _LONG.match(name) or _SHORT.match(name)
    if match is None:
        raise DeviceError(f"{name!r} is not a device; write '/job:ps/task:0' or 'ps:0'{at(caller())}")
    return f"/job:{match[1]}/task:{int(match[2])}"


def short(name: str) -> str:
    """The short form of a task's name, for tables and messages: `ps:0`."""
    match = _LONG.match(name)
    return f"{match[1]}:{match[2]}" if match else name


@contextmanager
def device(name: str) -> Iterator[None]:
    """Place the ops traced inside on the task `name` (`/job:ps/task:0` or `ps:0`).

    Ops on a variable stay where the variable lives. Raises DeviceError when the name cannot be read; that no task
    has this name is found when the function is placed.
    """
    with set_xla_metadata(**{METADATA_KEY: canonical(name)}):
        yield


@contextmanager
def with_state() -> Iterator[None]:
    """Place the ops traced inside where the variables they update live. `Optimizer.apply` runs under it."""
    with set_xla_metadata(**{METADATA_KEY: WITH_STATE}):
        yield
