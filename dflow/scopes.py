"""`with dflow.device(...)` and `with dflow.colocate_with(...)`: what a scope means before anything is traced.

In traced code a scope is a name that each op carries to placement. Elsewhere it is JAX's default device too, so that
arrays made inside are made there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import jax

from dflow.lowering.devices import device_named, local_devices, local_name
from dflow.tracing.device import AUTO, WITH_CALLER, choice_among, device_scope
from dflow.tracing.device_name import full_device_name, split_device_name, task_of
from dflow.tracing.errors import DeviceError
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.near_names import did_you_mean
from dflow.tracing.resources import Variable, is_variable
from dflow.tracing.source import at, caller


@contextmanager
def device(name: str | jax.Device | Sequence[str | jax.Device]) -> Iterator[None]:
    """Place the ops traced inside, and the variables made inside, on a device or a task.

    name    `cpu:1`, `gpu:0`, `tpu:2`: a device of this process, by its number among `jax.local_devices(backend=...)`;
            a `jax.Device` of this process; or a task of the cluster, `ps:0` or `/job:ps/task:0`; `auto` for whichever
            device of this process makes a step shortest, or a list of those among which to choose
    raises  DeviceError for what is neither, for a name that cannot be read, and for a device that this process does
            not have; that no task has a task's name is found when the function is placed

    The innermost scope counts. Ops on a variable stay where the variable lives. An op without a scope goes where most
    of the bytes lie that it takes. The ops of a gradient are on the device of the op they come from. Results stay on
    the device that made them. Outside of traced code it is JAX's default device as well.
    """
    if isinstance(name, (list, tuple)) or (isinstance(name, str) and name.lower() == AUTO):
        with device_scope(AUTO if isinstance(name, str) else _choice(name)):
            yield
        return
    try:
        written = _written(name)
        full = _full(written, [AUTO, *local_devices()])
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
    try:
        written = [_written(name) for name in names]
        if not names:
            raise DeviceError("no device is listed to choose among\n  name some, or say 'auto' for any")
        fulls = [_full(name, local_devices()) for name in written]
        if tasks := [task_of(full) for full in fulls if task_of(full)]:
            raise DeviceError(
                f"{tasks[0]!r} is a task, and a choice is among devices of this process\n  name these, such as cpu:1"
            )
        here = [local_name(device_named(split_device_name(full)[1])) for full in fulls]
    except DeviceError as error:
        raise DeviceError(_with_line(error)) from None
    return choice_among(here)


def _written(given: object) -> str:
    """The name of a device as it was written, or that of the device itself."""
    if isinstance(given, str):
        return given
    if not isinstance(given, jax.Device):
        remedy = "write a name such as 'cpu:0', or a list of such to choose among"
        if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
            remedy = f"write '{jax.default_backend()}:{given}', or give jax.local_devices()[{given}]"
        elif isinstance(given, jax.sharding.Sharding):
            remedy = "a variable takes a sharding as dflow.Variable(..., sharding=)"
        raise DeviceError(f"{given!r} is no device, nor the name of one\n  {remedy}")
    if given.process_index != jax.process_index():
        raise DeviceError(
            f"{given!r} is a device of process {given.process_index}, and this one is process {jax.process_index()}\n"
            f"  name a device of this process: {', '.join(local_devices())}"
        )
    return local_name(given)


def _full(name: str, known: Iterable[str]) -> str:
    """The full form of a name; of one that cannot be read the error tells those it may have been meant to be."""
    try:
        return full_device_name(name)
    except DeviceError as error:
        raise DeviceError(f"{error}\n  {remedy}" if (remedy := did_you_mean(name, known, "")) else str(error)) from None


def _with_line(error: DeviceError) -> str:
    fact, *remedy = str(error).split("\n", 1)
    return "\n".join([f"{fact}{at(caller())}", *remedy])
