"""`dflow.device` in a process with one CPU device: accepted and refused names. `device_scopes_.py` has several
devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import dflow
from dflow.distributed.cluster.cluster import cluster_with
from dflow.testing import memory_cluster

CPU = jax.local_devices(backend="cpu")[0]


@pytest.mark.parametrize("given", ["cpu:0", "CPU:0", "/device:cpu:0", CPU, ["cpu:0"], (CPU,), "auto", "Auto", "AUTO"])
def test_a_scope_is_a_device_a_name_or_a_choice_in_small_letters_or_large(given: Any) -> None:
    @dflow.jit
    def twice(x: Any) -> Any:
        with dflow.device(given):
            return x + x

    assert float(twice(jnp.float32(3.0))) == 6.0


REFUSED: dict[str, tuple[Any, str, str]] = {
    "a number": (1, "1 is no device, nor the name of one", "write 'cpu:1', or give jax.local_devices()[1]"),
    "a truth": (True, "True is no device, nor the name of one", "such as 'cpu:0'"),
    "nothing": (None, "None is no device, nor the name of one", "such as 'cpu:0'"),
    "a sharding": (
        SingleDeviceSharding(CPU),
        "SingleDeviceSharding(",
        "a variable takes a sharding as dflow.Variable(..., sharding=)",
    ),
    "a set": ({"cpu:0"}, "{'cpu:0'} is no device, nor the name of one", "'cpu:0', or a list of such to choose among"),
    "a number in a list": (["cpu:0", 1], "1 is no device, nor the name of one", "write 'cpu:1'"),
    "auto in a list": (["cpu:0", "auto"], "'auto' is not the name of a device", "at "),
    "no number": ("cpu", "'cpu' is not the name of a device; write cpu:1", "did you mean cpu:0?"),
    "letters that changed places": ("atuo", "'atuo' is not the name of a device", "did you mean auto?"),
    "no colon": ("cpu0", "'cpu0' is not the name of a device", "did you mean cpu:0?"),
    "a space": ("cpu:0 ", "'cpu:0 ' is not the name of a device", "did you mean cpu:0?"),
    "a name like no other": ("elsewhere", "'elsewhere' is not the name of a device; write cpu:1", "at "),
    "a high number": ("cpu:99", "there is no device cpu:99 in this process; the devices there are: ", "set XLA_FLAGS"),
    "another platform": ("tpu:0", "there is no device tpu:0 in this process; the devices there are: ", "name one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_device_is_refused_with_its_line_and_what_to_write(case: str) -> None:
    given, fact, remedy = REFUSED[case]
    with pytest.raises(dflow.DeviceError) as caught, dflow.device(given):
        pass
    told = str(caught.value)
    assert fact in told
    assert remedy in told
    assert re.search(r"\n  at \S*test_scopes.py:\d+", told)


@pytest.mark.parametrize("make", [lambda: dflow.Variable(1.0, name="v"), dflow.jit(lambda: jnp.ones(2) + 1)])
@pytest.mark.parametrize(("given", "meant"), [("cqu:0", "cpu"), ("gp:1", "gpu"), ("tup:0", "tpu")])
def test_a_platform_with_a_slip_is_not_taken_for_a_job(make: Callable[[], Any], given: str, meant: str) -> None:
    # The process may be a task of a cluster that another test has not closed: then the error names its jobs too.
    fact = rf"expected a device such as '{meant}:0'( or a task of the cluster's jobs \(.*\))?, got '{given}'"
    with pytest.raises(dflow.DeviceError, match=rf"{fact}\n  at \S*test_scopes.py:\d+"), dflow.device(given):
        make()


def test_a_device_of_another_process_is_refused_with_the_numbers_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    fact = re.escape(f"{CPU!r} is a device of process 0, and this one is process 3")
    with (
        pytest.raises(dflow.DeviceError, match=fact + r"\n  at .*:\d+\n  name a device of this process: "),
        dflow.device(CPU),
    ):
        pass


def test_a_near_name_is_told_for_a_misspelt_option_of_a_kernel() -> None:
    @dflow.kernel
    def double(x: Any) -> Any:
        return x * 2

    with pytest.raises(
        TypeError, match=r"kernel was given 'platfrom'[\s\S]*at .*scopes.py:\d+\n  did you mean platform"
    ):
        dflow.kernel(double, platfrom="cpu")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"kernel was given 'difflable'[^?]*\n  it takes platform, derivative, vmap$"):
        dflow.kernel(lambda x: x, difflable=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"kernel was given 3, which is no function\n  at .*:\d+"):
        dflow.kernel(3)  # type: ignore[call-overload]


def test_the_end_of_a_cluster_in_memory_closes_its_workers() -> None:
    with memory_cluster(ps=1) as memory:
        worker = memory.worker()
    assert worker.coordinator.session.is_closed
    assert cluster_with([]) is not worker
