from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import dflow
from dflow.lowering.passes.choose import Choose
from dflow.lowering.passes.place import Place
from dflow.lowering.pipeline import ALONE
from dflow.placement_view import explained
from dflow.tracing.text import parse
from tests.lowering.placement.given_costs import GivenCosts

GRAPH = """
graph(%w: ref<f32[64,64]> @/device:cpu:1, %x: f32[64,64]) {
 !%w_1: f32[64,64] = var.read(%w)  # train.py:3
  %a: f32[64,64] = jax.add(%x, %x)  @auto  # train.py:4
  %b: f32[64,64] = jax.dot_general(%a, %a) {DOT}  @auto  # train.py:5
  %c: f32[64,64] = jax.dot_general(%w_1, %x) {DOT}  @auto  # train.py:6
  %d: f32[64,64] = jax.add(%b, %c)  @/device:cpu:0  # train.py:7
 !%done: token = var.assign(%w, %d)  # train.py:8
  %e: f32[64,64] = jax.neg(%d)  # train.py:9
  return %e
}""".replace(
    "DOT",
    "dimension_numbers=(((1,), (0,)), ((), ())), out_sharding=None, precision=None, preferred_element_type=f32",
)

TEXT = """\
step: a step is predicted to take 673 us, measured 700 us
  cpu:0 works for 557 us and holds 81.9 kB at its peak
  cpu:1 works for 546 us and holds 65.5 kB at its peak
  3 values travel, 49.2 kB
  as far as it may be on one device, it would take 1.13 ms on cpu:0, 1.22 ms on cpu:1
%w_1                cpu:1  %w lives there  # train.py:3
%b and 1 before it  cpu:0  chosen: the step ends 545 us earlier than with cpu:1  # train.py:4, train.py:5
%c                  cpu:1  chosen: the step ends 456 us earlier than with cpu:0  # train.py:6
%e and 1 before it  cpu:0  stated  # train.py:7, train.py:9
%done               cpu:1  %w lives there  # train.py:8"""


def test_the_text_of_an_explanation() -> None:
    graph = parse(GRAPH)
    decision = Choose(Place(ALONE, (ALONE,), ("cpu:0", "cpu:1")), GivenCosts()).decide(graph)
    assert str(explained("step", graph, decision, 7e-4)) == TEXT


def test_variables_on_one_device_share_a_line() -> None:
    graph = parse("""
graph(%v: ref<f32[]> @/device:cpu:1, %w: ref<f32[]> @/device:cpu:1) {
 !%v_1: f32[] = var.read(%v)  # train.py:3
 !%w_1: f32[] = var.read(%w)  # train.py:4
  %a: f32[] = jax.add(%v_1, %w_1)  @/device:cpu:1  # train.py:5
  return %a
}""")
    decision = Choose(Place(ALONE, (ALONE,), ("cpu:0", "cpu:1")), GivenCosts()).decide(graph)
    found = explained("step", graph, decision, None)
    assert str(found).split("\n")[-2:] == [
        "%v_1 to %w_1  cpu:1  variables that live there  # train.py:3, train.py:4",
        "%a            cpu:1  stated  # train.py:5",
    ]
    assert [part.is_state for part in found.parts] == [True, True, False]


def test_in_a_process_of_one_device_all_is_on_it() -> None:
    w = dflow.Variable(jnp.ones(3), name="w")

    def step(x: Any) -> Any:
        with dflow.device("auto"):
            return x * w

    found = dflow.explain_placement(step, jnp.ones(3), rounds=1)
    assert {part.device for part in found.parts} == set(found.busy_s) | set(found.peak_bytes)
    assert len(found.busy_s) == 1


def test_a_function_that_uses_a_queue_is_not_run() -> None:
    queue = dflow.FIFOQueue(2, jnp.float32(0))

    def step() -> Any:
        queue.enqueue(1.0)
        return queue.dequeue()

    assert dflow.explain_placement(step).measured_s is None
    assert int(queue.size()) == 0
