"""Device scopes: which task the ops traced inside are placed on.

A device in a graph is a task's name, or `WITH_STATE`, which asks placement to put an op where the state it updates
lives. A scope (`with device(...)`) reaches an op through JAX's own trace context, so that the ops of a gradient
take the device of the op they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jax.experimental.xla_metadata import set_xla_metadata

from dflow.tracing.errors import DeviceError
from dflow.tracing.source import at, caller
from dflow.tracing.task_name import full_task_name

#: The key under which a device scope travels in JAX's trace context.
METADATA_KEY = "dflow_device"

#: The placement of an op that belongs to an update: it goes where the variables that it feeds live.
WITH_STATE = "with-state"


@contextmanager
def device(name: str) -> Iterator[None]:
    """Place the ops traced inside on the task `name` (`/job:ps/task:0` or `ps:0`).

    Ops on a variable stay where the variable lives. Raises DeviceError when the name cannot be read; that no task
    has this name is found when the function is placed.
    """
    try:
        full = full_task_name(name)
    except DeviceError as error:
        raise DeviceError(f"{error}{at(caller())}") from None
    with set_xla_metadata(**{METADATA_KEY: full}):
        yield


@contextmanager
def with_state() -> Iterator[None]:
    """Place the ops traced inside where the variables they update live. `Optimizer.apply` runs under it."""
    with set_xla_metadata(**{METADATA_KEY: WITH_STATE}):
        yield
