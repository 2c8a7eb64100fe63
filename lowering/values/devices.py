"""The devices of this process, by the names in scopes and graphs: `cpu:1` is JAX's local device 1 of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from dflow.tracing.errors import DeviceError


def local_devices() -> dict[str, jax.Device]:
    """Return the devices of this process by name, those of JAX's default platform first, then those of the CPU."""
    devices = list(jax.local_devices())
    if devices[0].platform != "cpu":
        devices += jax.local_devices(backend="cpu")
    return {local_name(device): device for device in devices}


def local_name(device: jax.Device) -> str:
    """Return the name of a device of this process, such as `cpu:1`."""
    return f"{device.platform}:{jax.local_devices(backend=device.platform).index(device)}"


def default_name() -> str:
    """Return the name of JAX's default device: `jax.default_device`, else the first."""
    config: Any = jax.config  # its fields have no declared types
    default = config.jax_default_device
    if isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return local_name(default or jax.local_devices()[0])


def devices_in_order() -> tuple[str, ...]:
    """Return the names of all devices of this process, the default one first."""
    return tuple(dict.fromkeys([default_name(), *local_devices()]))


def device_named(local: str) -> jax.Device:
    """Return the device `cpu:1`, `gpu:0`, ... of this process; `cuda` and `rocm` accept only that kind of `gpu`.

    Raises DeviceError, which lists the existing devices, if there is none of that name.
    """
    platform, _, number = local.lower().partition(":")
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:  # a platform that this installation of JAX, or this machine, does not have
        devices = []
    if int(number) >= len(devices):
        raise DeviceError(*no_device(local, list(local_devices())))
    return devices[int(number)]


def no_device(local: str, names: Sequence[str]) -> tuple[str, str]:
    """Return the message and the remedy of a DeviceError for a device that is not among `names`."""
    there = ", ".join(sorted(names)) if len(names) <= 4 else f"{names[0]} to {names[-1]}"
    number = int(local.partition(":")[2]) + 1
    remedy = f"set XLA_FLAGS=--xla_force_host_platform_device_count={max(number, 2)} before JAX is first used, for CPUs"
    if not local.lower().startswith("cpu"):
        remedy = "name one of these, or run where there is one, with the jax that drives it"
    return f"there is no device {local} in this process; the devices there are: {there}", remedy
