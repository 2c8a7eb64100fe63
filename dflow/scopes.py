"""`with dflow.device(...)` and `with dflow.colocate_with(...)`: what a scope means before anything is traced.

In traced code a scope is a name that each op carries to placement. Elsewhere it is JAX's default device too, so that
arrays made inside are made there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import jax

from dflow.lowering.devices import device_named, local_name
from dflow.tracing.device import AUTO, WITH_CALLER, choice_among, device_scope
from dflow.tracing.device_name import full_device_name, split_device_name, task_of
from dflow.tracing.errors import DeviceError
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.resources import Variable, is_variable
from dflow.tracing.source import at, caller


@contextmanager
def device(name: str | jax.Device | Sequence[str | jax.Device]) -> Iterator[None]:
    """Place the ops traced inside, and the variables made inside, on a device or a task.

    name    `cpu:1`, `gpu:0`, `tpu:2`: a device of this process, by its number among `jax.local_devices(backend=...)`;
            a `jax.Device` of this process; or a task of the cluster, `ps:0` or `/job:ps/task:0`; `auto` for whichever
            device of this process makes a step shortest, or a list of those among which to choose
    raises  DeviceError for a name that cannot be read, and for a device that this process does not have; that no task
            has a task's name is found when the function is placed

    The innermost scope counts. Ops on a variable stay where the variable lives. An op without a scope goes where most
    of the bytes lie that it takes. The ops of a gradient are on the device of the op they come from. Results stay on
    the device that made them. Outside of traced code it is JAX's default device as well.
    """
    if name == AUTO or isinstance(name, (list, tuple)):
        with device_scope(AUTO if name == AUTO else _choice(name)):
            yield
        return
    try:
        written = name if isinstance(name, str) else local_name(name)
        full = full_device_name(written)
        # By the platform as it was written, since `cuda` and `rocm` are one in the full name.
        here = device_named(":".join(written.split("/")[-1].split(":")[-2:])) if not task_of(full) else None
    except DeviceError as error:
        raise DeviceError(_with_line(error)) from None
    with device_scope(full), nullcontext() if here is None or is_tracing() else jax.default_device(here):
        yield


@contextmanager
def colocate_with(variable: Variable) -> Iterator[None]:
    """Place the ops traced inside, and the variables made inside, where `variable` lives.

    raises  DeviceError for what is no variable
    """
    if not is_variable(variable):
        raise DeviceError(
            f"colocate_with was given a {type(variable).__name__}, which lives nowhere{at(caller())}\n"
            "  give it a dflow.Variable, or name the device with dflow.device"
        )
    with device_scope(variable.device or WITH_CALLER):
        yield


def _choice(names: Sequence[str | jax.Device]) -> str:
    """The wish for one of these devices."""
    written = [name if isinstance(name, str) else local_name(name) for name in names]
    try:
        if not names:
            raise DeviceError("no device is listed to choose among\n  name some, or say 'auto' for any")
        fulls = [full_device_name(name) for name in written]
        if tasks := [task_of(full) for full in fulls if task_of(full)]:
            raise DeviceError(
                f"{tasks[0]!r} is a task, and a choice is among devices of this process\n  name these, such as cpu:1"
            )
        here = [local_name(device_named(split_device_name(full)[1])) for full in fulls]
    except DeviceError as error:
        raise DeviceError(_with_line(error)) from None
    return choice_among(here)


def _with_line(error: DeviceError) -> str:
    fact, *remedy = str(error).split("\n", 1)
    return "\n".join([f"{fact}{at(caller())}", *remedy])
