from __future__ import annotations

import re

import pytest

from dflow.lowering.passes.place import Place
from dflow.lowering.pipeline import ALONE
from dflow.tracing.errors import DeviceError
from dflow.tracing.syntax.text import parse
from tests.lowering.meaning import DEVICES, TASKS, WORKER


def test_a_device_that_no_task_offers_is_named_with_the_line_and_the_tasks() -> None:
    graph = parse("""
graph(%x: f32[]) {
  %loss: f32[] = jax.neg(%x)  @/job:ps/task:7  # train.py:14
  return %loss
}""")
    message = (
        "%loss is placed on /job:ps/task:7, but no task offers it; the tasks are worker:0, ps:0, ps:1\n"
        "  at train.py:14\n"
        "  name one of these, or start more tasks"
    )
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        Place(WORKER, TASKS)(graph)


def test_a_variable_on_a_task_that_is_not_there_is_refused() -> None:
    graph = parse("graph(%w: ref<f32[]> @/job:ps/task:7) {\n  return\n}")
    with pytest.raises(DeviceError, match="%w is placed on /job:ps/task:7, but no task offers it"):
        Place(WORKER, TASKS)(graph)


def test_alone_every_other_task_is_refused() -> None:
    graph = parse("graph(%x: f32[]) {\n  %1: f32[] = jax.neg(%x)  @/job:ps/task:0\n  return %1\n}")
    with pytest.raises(
        DeviceError, match=r"no task offers it; the tasks are localhost:0\n  at .*\n  name one of these"
    ):
        Place(ALONE, (ALONE,))(graph)


def test_a_choice_is_not_made_on_a_cluster() -> None:
    graph = parse("graph(%x: f32[]) {\n  %1: f32[] = jax.neg(%x)  @auto  # train.py:14\n  return %1\n}")
    message = (
        "%1 is to be where a step is shortest, and on a cluster that is not chosen\n"
        "  at train.py:14\n"
        "  name a task, or a device of this process"
    )
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        Place(WORKER, TASKS)(graph)


def test_a_device_that_the_caller_does_not_have_is_named_with_the_line_and_those_there_are() -> None:
    graph = parse("""
graph(%x: f32[]) {
  %loss: f32[] = jax.neg(%x)  @/device:cpu:7  # train.py:14
  return %loss
}""")
    message = (
        "%loss is placed on cpu:7, but there is no device cpu:7 in this process; "
        "the devices there are: cpu:0, cpu:1, cpu:2\n"
        "  at train.py:14\n"
        "  set XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX is first used, for CPUs"
    )
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        Place(WORKER, TASKS, DEVICES)(graph)


def test_a_device_of_another_task_is_refused() -> None:
    graph = parse("graph(%x: f32[]) {\n  %1: f32[] = jax.neg(%x)  @/job:ps/task:0/device:cpu:1\n  return %1\n}")
    match = r"%1 is placed on .*, and a task chooses among its devices itself\n  at .*\n  name the task alone, ps:0"
    with pytest.raises(DeviceError, match=match):
        Place(WORKER, TASKS, DEVICES)(graph)
