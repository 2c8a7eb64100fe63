"""Runs of passes in order, a pass that breaks the graph, and the graphs of each pass beside its golden file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

import dflow
from dflow.lowering.passes import fold
from dflow.lowering.passes.base import Pass, run_passes
from dflow.lowering.passes.fold import fold as folded
from dflow.lowering.passes.merge import merge
from dflow.lowering.passes.place import Place
from dflow.lowering.passes.schedule import schedule
from dflow.lowering.pipeline import ALONE, SIMPLIFY, pipeline
from dflow.tracing.errors import DeviceError, VerifyError
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.queues import FIFOQueue
from dflow.tracing.syntax.text import parse, text
from dflow.tracing.syntax.verify import verify
from tests.golden import GoldenCase, check, read_golden
from tests.lowering.meaning import DEVICES, TASKS, WORKER, assert_same_meaning

GRAPH = parse("""
graph(%x: f32[]) {
  %1: f32[] = jax.neg(%x)  # train.py:7
  %2: f32[] = jax.neg(%x)
  %3: f32[] = jax.mul(%1, %2)  # train.py:9
  return %1, %3
}""")


#: A pass with a fault: uses come before what they use.
BACKWARDS = Pass("backwards", lambda graph: dataclasses.replace(graph, nodes=graph.nodes[::-1]))


def test_an_observer_sees_what_was_traced_and_what_each_pass_made() -> None:
    seen: list[tuple[str, Graph]] = []
    made = run_passes(GRAPH, SIMPLIFY, observe=lambda name, graph: seen.append((name, graph)))
    assert [name for name, _ in seen] == ["traced", "prune", "merge"]
    assert seen[0][1] is GRAPH
    assert seen[-1][1] is made
    assert len(made.nodes) == 2


def test_a_pass_that_breaks_the_graph_is_blamed_by_name() -> None:
    seen: list[str] = []
    passes = [SIMPLIFY[0], BACKWARDS, SIMPLIFY[1]]
    with pytest.raises(VerifyError, match=r"%3: %1 is used before it is defined\n  at train.py:9") as caught:
        run_passes(GRAPH, passes, check=True, observe=lambda name, _: seen.append(name))
    assert caught.value.__notes__ == ["after the pass 'backwards'; the graph was valid before it"]
    # The observer saw the broken graph, so a dump contains it.
    assert seen == ["traced", "prune", "backwards"]


def test_no_pass_is_blamed_for_a_graph_that_was_broken_before() -> None:
    with pytest.raises(VerifyError, match="used before it is defined") as caught:
        run_passes(BACKWARDS.made_of(GRAPH), SIMPLIFY, check=True)
    assert not hasattr(caught.value, "__notes__")


def test_nothing_is_compiled_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "_evaluated", lambda graph, nodes: pytest.fail("evaluated") if nodes else {})
    folded(
        parse("""
graph(%q: queue<i32[]>, %x: i32[]) {
  %1: i32[] = jax.neg(%x)  @/job:worker/task:0
 !%2: token = queue.enqueue(%q, %1)  @/job:worker/task:0
  return
}"""),
        WORKER,
    )


def test_numbers_are_those_of_the_call_that_would_have_made_them() -> None:
    """Integers wrap, divide and shift as in XLA, not as in Python."""
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "wraps": (jnp.add, (np.int8(100), np.int8(100))),
        "rounds down": (jnp.floor_divide, (np.int32(-7), np.int32(2))),
        "remainder": (jnp.remainder, (np.int32(-7), np.int32(4))),
        "divides by none": (jax.lax.div, (np.int32(7), np.int32(0))),
        "shifts out": (jnp.left_shift, (np.int32(7), np.int32(40))),
        "chooses": (lambda x, y: jnp.where(x > y, x, 1), (np.uint8(3), np.uint8(250))),
    }
    for name, (fn, literals) in programs.items():
        wanted = jax.jit(fn)(*literals)
        queue = FIFOQueue(2, jax.typeof(wanted))

        @dflow.jit
        def step(fn: Any = fn, literals: Any = literals, queue: Any = queue) -> jax.Array:
            queue.enqueue(fn(*literals))
            given: jax.Array = queue.dequeue()
            return given

        graph = run_passes(dflow.graph(step).graph, pipeline())
        assert not [node for node in graph.nodes if node.op is ops.xla_call], name
        assert step() == wanted, name


def test_nodes_whose_attributes_cannot_be_compared_are_never_shared() -> None:
    graph = parse("""
graph(%x: i32[2,2]) {
  %1: i32[2,2] = jax.transpose(%x) {permutation=[1, 0]}
  %2: i32[2,2] = jax.transpose(%x) {permutation=[1, 0]}
  return %1, %2
}""")
    assert text(merge(graph)) == text(graph)


def test_attributes_that_compare_equal_and_have_another_type_or_other_bits_are_told_apart() -> None:
    attributes = ["1", "1.0", "True", "0.0", "-0.0", "(1, 0.0)", "(True, 0.0)", "1", "(1, 0.0)"]
    nodes = "".join(f"  %{number}: i32[] = jax.pow(%x) {{y={y}}}\n" for number, y in enumerate(attributes))
    graph = parse(f"graph(%x: i32[]) {{\n{nodes}  return {', '.join(f'%{n}' for n in range(9))}\n}}")
    assert text(merge(graph)).endswith("return %0, %1, %2, %3, %4, %5, %6, %0, %5\n}")


def test_nodes_traced_in_another_context_are_not_shared() -> None:
    def twice(x: jax.Array) -> list[jax.Array]:
        with set_xla_metadata(note="here"):
            first = jnp.sin(x)
        return [first, jnp.sin(x), jnp.sin(x)]

    traced = trace(twice, (1.5,), {})
    assert len(traced.graph.nodes) == 3
    assert len(merge(traced.graph).nodes) == 2


#: All but `choose`, which needs costs; `schedule` also for small values.
PASSES = {one.name: one for one in pipeline(WORKER, TASKS, DEVICES)}
PASSES["schedule"] = Pass("schedule", partial(schedule, least_bytes=0))
CASES = [case for name in PASSES for case in read_golden(Path(__file__).with_name(f"{name}.graphs"))]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.path.stem}: {case.name}" for case in CASES])
def test_golden(case: GoldenCase) -> None:
    graph = parse(case.input)
    verify(graph)
    made = run_passes(graph, [PASSES[case.path.stem]])
    assert text(graph) == text(parse(case.input))
    check(case, text(made))
    verify(made)
    assert_same_meaning(graph, made)


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
