"""Device scopes: where the ops traced inside are placed, and where the variables made inside live.

A device in a graph is a full name as in `device_name.py`, or a request to placement: `WITH_STATE` puts an op beside the
state that it updates, `WITH_CALLER` on the caller's default device. A scope reaches an op through JAX's own trace
context, so that the ops of a gradient take the device of the op they come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from jax.experimental.xla_metadata import set_xla_metadata

from dflow.tracing.context_values import within

#: The key under which a device scope travels in JAX's trace context.
METADATA_KEY = "dflow_device"

#: The placement of an op that belongs to an update: it goes where the variables that it feeds live.
WITH_STATE = "with-state"

#: The placement of an op that was put beside a variable that has no device.
WITH_CALLER = "with-caller"

#: The placement of an op whose device dflow chooses: among the caller's devices, or among the ones listed after it.
AUTO = "auto"

_scope: ContextVar[str | None] = ContextVar("dflow_device", default=None)


@contextmanager
def device_scope(full: str) -> Iterator[None]:
    """Place the ops traced inside on the device of this full name. An inner scope replaces an outer one."""
    with within(_scope, full), set_xla_metadata(**{METADATA_KEY: full}):
        yield


def scope_here() -> str | None:
    """The device that the scope around this line names; None without one."""
    return _scope.get()


@contextmanager
def with_state() -> Iterator[None]:
    """Place the ops traced inside where the variables they update live. `Optimizer.apply` runs under it."""
    with set_xla_metadata(**{METADATA_KEY: WITH_STATE}):
        yield


def choice_among(devices: Sequence[str]) -> str:
    """The name of a scope that lets dflow choose among these devices of the caller; among all, if none is named."""
    return "/".join([AUTO, *devices])


def choices_in(device: str | None) -> tuple[str, ...] | None:
    """The devices that a scope of `choice_among` names; None for any other scope, and without one."""
    first, *names = (device or "").split("/")
    return tuple(names) if first == AUTO else None


def is_within_task(device: str | None) -> bool:
    """Whether a scope names a device within the caller's own task, rather than a task."""
    return device is not None and (device == WITH_CALLER or device.startswith("/device:"))
