"""Device scopes: `with dflow.device(...)` and `with dflow.colocate_with(...)`.

In traced code a scope is a name that each op carries to placement. Outside traced code it also sets JAX's default
device, so that arrays are created there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import jax

from dflow.lowering.values.devices import device_named, local_devices, local_name
from dflow.tracing.devices.device import AUTO, WITH_CALLER, choice_among, device_scope
from dflow.tracing.devices.device_name import full_device_name, split_device_name, task_of
from dflow.tracing.errors import DeviceError
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.near_names import did_you_mean
from dflow.tracing.source import caller
from dflow.tracing.state.resources import Variable, is_variable


@contextmanager
def device(name: str | jax.Device | Sequence[str | jax.Device]) -> Iterator[None]:
    """Place the ops traced inside, and the variables created inside, on a device or a task.

    name    a device of this process: `cpu:1`, `gpu:0`, `tpu:2`, by its number in `jax.local_devices(backend=...)`, or
            the `jax.Device`; a task of the cluster: `ps:0` or `/job:ps/task:0`; or devices to choose among for the
            shortest step: `auto` for all devices of this process, or a list
    raises  DeviceError for any other object, a malformed name, or a device that this process does not have; an unknown
            task is found later, when the function is placed

    The innermost scope counts. Ops on a variable run where the variable lives. An op without a scope runs where most
    bytes of its inputs are. The ops of a gradient run on the device of the op that they differentiate. Results stay on
    the device that computed them. Outside traced code, it is also JAX's default device.
    """
    if isinstance(name, (list, tuple)) or (isinstance(name, str) and name.lower() == AUTO):
        with device_scope(AUTO if isinstance(name, str) else _choice(name)):
            yield
        return
    written = _written(name)
    full = _full(written, [AUTO, *local_devices()])
    # Look up the platform as written, since the full name does not distinguish `cuda` and `rocm`.
    here = device_named(":".join(written.split("/")[-1].split(":")[-2:])) if not task_of(full) else None
    with device_scope(full), nullcontext() if here is None or is_tracing() else jax.default_device(here):
        yield


@contextmanager
def colocate_with(variable: Variable) -> Iterator[None]:
    """Place the ops traced inside, and the variables created inside, where `variable` lives.

    raises  DeviceError if `variable` is not a variable
    """
    if not is_variable(variable):
        raise DeviceError(
            f"colocate_with was given a {type(variable).__name__}, which lives nowhere",
            "give it a dflow.Variable, or name the device with dflow.device",
        )
    with device_scope(variable.device or WITH_CALLER):
        yield


def _choice(names: Sequence[str | jax.Device]) -> str:
    """Return the scope name for a choice among these devices of this process."""
    if not names:
        raise DeviceError("no device is listed to choose among", "name some, or say 'auto' for any")
    fulls = [_full(_written(name), local_devices()) for name in names]
    if tasks := [task_of(full) for full in fulls if task_of(full)]:
        raise DeviceError(
            f"{tasks[0]!r} is a task, and a choice is among devices of this process", "name these, such as cpu:1"
        )
    return choice_among([local_name(device_named(split_device_name(full)[1])) for full in fulls])


def _written(given: object) -> str:
    """Return a device's name as the user wrote it, or the name of a `jax.Device`."""
    if isinstance(given, str):
        return given
    if not isinstance(given, jax.Device):
        remedy = "write a name such as 'cpu:0', or a list of such to choose among"
        if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
            remedy = f"write '{jax.default_backend()}:{given}', or give jax.local_devices()[{given}]"
        elif isinstance(given, jax.sharding.Sharding):
            remedy = "a variable takes a sharding as dflow.Variable(..., sharding=)"
        raise DeviceError(f"{given!r} is no device, nor the name of one", remedy)
    if given.process_index != jax.process_index():
        raise DeviceError(
            f"{given!r} is a device of process {given.process_index}, and this one is process {jax.process_index()}",
            f"name a device of this process: {', '.join(local_devices())}",
        )
    return local_name(given)


def _full(name: str, known: Iterable[str]) -> str:
    """Return the full form of a name. Raises DeviceError, with similar known names, if it cannot be read."""
    try:
        return full_device_name(name)
    except DeviceError as error:
        raise DeviceError(str(error), did_you_mean(name, known, ""), at=caller()) from None
