from __future__ import annotations

import re

import pytest

from dflow.tracing.devices.device_name import (
    device_name,
    full_device_name,
    short_device_name,
    split_device_name,
    task_of,
)
from dflow.tracing.devices.task_name import full_task_name, short_task_name, split_task_name, task_name
from dflow.tracing.errors import DeviceError

FORMS = {
    "cpu:1": ("/device:cpu:1", "cpu:1"),
    "/cpu:1": ("/device:cpu:1", "cpu:1"),
    "GPU:0": ("/device:gpu:0", "gpu:0"),
    "/device:TPU:02": ("/device:tpu:2", "tpu:2"),
    "cuda:3": ("/device:gpu:3", "gpu:3"),
    "rocm:3": ("/device:gpu:3", "gpu:3"),
    "ps:0": ("/job:ps/task:0", "ps:0"),
    "/job:ps/task:0": ("/job:ps/task:0", "ps:0"),
    "ps:0/cpu:1": ("/job:ps/task:0/device:cpu:1", "ps:0/cpu:1"),
    "/job:ps/task:0/device:cuda:1": ("/job:ps/task:0/device:gpu:1", "ps:0/gpu:1"),
}


@pytest.mark.parametrize("written", FORMS)
def test_a_name_has_a_full_and_a_short_form(written: str) -> None:
    full, short = FORMS[written]
    assert full_device_name(written) == full
    assert short_device_name(full) == short
    assert full_device_name(full) == full_device_name(short) == full


def test_a_full_name_is_a_task_and_a_device_of_it() -> None:
    assert split_device_name("/job:ps/task:0/device:cpu:1") == ("/job:ps/task:0", "cpu:1")
    assert split_device_name("/job:ps/task:0") == ("/job:ps/task:0", "")
    assert split_device_name("/device:cpu:1") == ("", "cpu:1")
    assert task_of("/job:ps/task:0/device:cpu:1") == "/job:ps/task:0"
    assert device_name("/job:ps/task:0", "cpu:1") == "/job:ps/task:0/device:cpu:1"


@pytest.mark.parametrize(
    "bad",
    ["gpu", "cpu:", ":1", "", "7:0", "/job:ps", "/job:ps/task:x", "ps:0 ", "ps:0/cpu", "ps:0/ps:1", "/cpu:1/2"],
)
def test_a_text_that_is_no_name_of_a_device_is_refused(bad: str) -> None:
    with pytest.raises(DeviceError, match=re.escape(f"{bad!r} is not the name of a device; write cpu:1, gpu:0")):
        full_device_name(bad)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "cuda", "rocm", "GPU"])
def test_a_platform_is_no_job(platform: str) -> None:
    with pytest.raises(DeviceError, match=f"'{platform}' is a platform, so {platform}:1 is a device, not a task"):
        task_name(platform, 1)


def test_the_name_of_a_task_and_its_parts() -> None:
    assert task_name("ps", 3) == "/job:ps/task:3"
    assert split_task_name("/job:ps/task:3") == ("ps", 3)
    assert short_task_name("/job:ps/task:3") == "ps:3"
    assert full_task_name("ps:3") == full_task_name("/job:ps/task:3") == "/job:ps/task:3"
    assert short_task_name("the coordinator") == "the coordinator"


@pytest.mark.parametrize("bad", ["ps:3", "/job:ps/task:", "/job:p s/task:1", "/job:ps/task:1/"])
def test_a_text_that_is_no_name_of_a_task_is_refused(bad: str) -> None:
    with pytest.raises(DeviceError, match="is not the name of a task; write /job:<job>/task:<index>"):
        split_task_name(bad)
