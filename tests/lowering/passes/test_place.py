from __future__ import annotations

import re

import pytest

from dflow.lowering.passes.place import Place
from dflow.lowering.pipeline import ALONE
from dflow.tracing.errors import DeviceError
from dflow.tracing.syntax.text import parse
from tests.lowering.meaning import DEVICES, TASKS, WORKER

CHOSEN = "is to be where a step is shortest, and on a cluster that is not chosen"
NOT_HERE = (
    "is placed on cpu:7, but there is no device cpu:7 in this process; the devices there are: cpu:0, cpu:1, cpu:2"
)
NO_TASK = "is placed on /job:ps/task:{}, but no task offers it; the tasks are {}"


@pytest.mark.parametrize(
    ("device", "place", "fact", "remedy"),
    [
        ("/job:ps/task:7", Place(WORKER, TASKS), NO_TASK.format(7, "worker:0, ps:0, ps:1"), "name one of these, or"),
        ("/job:ps/task:0", Place(ALONE, (ALONE,)), NO_TASK.format(0, "localhost:0"), "name one of these"),
        ("auto", Place(WORKER, TASKS), CHOSEN, "name a task, or a device of this process"),
        (
            "/device:cpu:7",
            Place(WORKER, TASKS, DEVICES),
            NOT_HERE,
            "set XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX is first used, for CPUs",
        ),
        (
            "/job:ps/task:0/device:cpu:1",
            Place(WORKER, TASKS, DEVICES),
            "is placed on /job:ps/task:0/device:cpu:1, and a task chooses among its devices itself",
            "name the task alone, ps:0",
        ),
    ],
)
def test_a_device_that_an_op_cannot_have_is_refused_with_its_line_and_a_remedy(
    device: str, place: Place, fact: str, remedy: str
) -> None:
    graph = parse(f"graph(%x: f32[]) {{\n  %loss: f32[] = jax.neg(%x)  @{device}  # train.py:14\n  return %loss\n}}")
    message = f"%loss {fact}\n  at train.py:14\n  {remedy}"
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}"):
        place(graph)


def test_a_variable_on_a_task_that_is_not_there_is_refused() -> None:
    graph = parse("graph(%w: ref<f32[]> @/job:ps/task:7) {\n  return\n}")
    with pytest.raises(DeviceError, match="%w is placed on /job:ps/task:7, but no task offers it"):
        Place(WORKER, TASKS)(graph)
