from __future__ import annotations

import jax
import pytest

from dflow.lowering.values.devices import default_name, device_named, local_devices, local_name
from dflow.tracing.errors import DeviceError


def test_each_device_has_one_name() -> None:
    devices = local_devices()
    assert {name: local_name(device) for name, device in devices.items()} == {name: name for name in devices}
    assert {name: device_named(name) for name in devices} == devices
    assert next(iter(devices.values())) == jax.local_devices()[0]


def test_the_default_device_is_jax_s() -> None:
    assert default_name() == next(iter(local_devices()))
    with jax.default_device(jax.local_devices(backend="cpu")[-1]):
        assert device_named(default_name()) == jax.local_devices(backend="cpu")[-1]
    with jax.default_device("cpu"):
        assert default_name() == "cpu:0"


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    match = r"there is no device cpu:99 in this process; the devices there are: [\s\S]*device_count=100"
    with pytest.raises(DeviceError, match=match):
        device_named("cpu:99")
    with pytest.raises(DeviceError, match=r"no device tpu:7 in this process[\s\S]*name one of these"):
        device_named("tpu:7")
