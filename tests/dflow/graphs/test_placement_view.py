from __future__ import annotations

from functools import partial
from itertools import chain, repeat
from typing import Any

import jax.numpy as jnp
import pytest

import dflow
from dflow.calls.single_executable import SingleExecutable
from dflow.graphs.placement_view import explained
from dflow.lowering.passes.choose import Choose
from dflow.lowering.passes.place import Place
from dflow.lowering.pipeline import ALONE
from dflow.lowering.state.store import Store
from dflow.tracing.syntax.text import parse
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
  pricing took 2 s, the search 1 s
%w_1    cpu:1  %w lives there  # train.py:3
%a, %b  cpu:0  chosen: the step ends 545 us earlier than with cpu:1  # train.py:4, train.py:5
%c      cpu:1  chosen: the step ends 456 us earlier than with cpu:0  # train.py:6
%d      cpu:0  stated  # train.py:7
%done   cpu:1  %w lives there  # train.py:8
%e      cpu:0  no scope: beside what it takes  # train.py:9"""


def test_the_text_of_an_explanation() -> None:
    graph = parse(GRAPH)
    seconds = chain([0.0, 1.0, 2.0], repeat(3.0))
    chooser = Choose(Place(ALONE, (ALONE,), ("cpu:0", "cpu:1")), GivenCosts(), clock=lambda: next(seconds))
    assert str(explained("step", graph, chooser.decide(graph), 7e-4)) == TEXT


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
        "%v_1, %w_1  cpu:1  variables that live there  # train.py:3, train.py:4",
        "%a          cpu:1  stated  # train.py:5",
    ]
    assert [part.is_state for part in found.parts] == [True, False]


GRAPH_OF_REASONS = """
graph(%v: ref<f32[64]> @/device:cpu:1, %x: f32[64]) {
 !%v_1: f32[64] = var.read(%v)
  %a: f32[64] = jax.neg(%v_1)  @/device:cpu:1
  %b: f32[64] = jax.sin(%a)
  %c: f32[64] = jax.cos(%b)  @auto/cpu:1
  %d: f32[64] = jax.neg(%c)  @with-state
 !%done: token = var.assign(%v, %d)
  return %b
}"""


def test_each_op_has_its_device_and_its_own_reason() -> None:
    graph = parse(GRAPH_OF_REASONS)
    decision = Choose(Place(ALONE, (ALONE,), ("cpu:0", "cpu:1")), GivenCosts()).decide(graph)
    found = explained("step", graph, decision, None)
    assert [(part.values, part.device, part.reason) for part in found.parts] == [
        (("v_1",), "cpu:1", "%v lives there"),
        (("a",), "cpu:1", "stated"),
        (("b",), "cpu:1", "no scope: beside what it takes"),
        (("c",), "cpu:1", "the only device that it may run on"),
        (("d",), "cpu:1", "beside the variable that it updates"),
        (("done",), "cpu:1", "%v lives there"),
    ]


def test_a_step_is_measured_as_a_loop_calls_it_and_no_value_is_read_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    called, copied = list[int](), list[str]()
    call, read = SingleExecutable.call, Store.read

    def noting_call(self: SingleExecutable, args: Any, kwargs: Any) -> Any:
        called.append(len(copied))
        return call(self, args, kwargs)

    def noting_read(self: Store, key: str) -> Any:
        copied.append(key)
        return read(self, key)

    monkeypatch.setattr(SingleExecutable, "call", noting_call)
    monkeypatch.setattr(Store, "read", noting_read)
    v, w = dflow.Variable(jnp.ones(3), name="v"), dflow.Variable(jnp.ones(3), name="w")

    @dflow.jit
    def step(x: Any) -> None:
        v.assign_add(x)
        w.assign(v * 2)

    assert dflow.explain_placement(step, jnp.ones(3), rounds=2).measured_s
    assert called == [2] * len(called), "all calls come after the two copies"
    assert len(called) > 5
    assert len(copied) == 2
    assert v.read().tolist() == w.read().tolist() == [1.0] * 3


def test_static_arguments_and_keywords_are_the_function_s_and_donated_arguments_stay() -> None:
    @partial(dflow.jit, static_argnums=0, donate_argnums=1)
    def power(n: int, x: Any, *, scale: Any) -> Any:
        return scale * x**n

    x = jnp.ones(8)
    found = dflow.explain_placement(power, 3, x, scale=2.0)
    assert found.name == "power"
    assert found.measured_s
    assert not x.is_deleted()


def test_within_eager_too_it_is_the_compiled_function_that_is_explained() -> None:
    v = dflow.Variable(0.0)
    with dflow.eager():
        assert dflow.explain_placement(lambda: v.assign_add(1.0)).measured_s
    assert float(v) == 0.0


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


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (
            {"round": 3},
            TypeError,
            r"was given 'round', which it does not take\n  at .*view.py:\d+\n  did you mean rounds\?",
        ),
        ({"scal": 3}, TypeError, r"was given 'scal', [\s\S]*did you mean scale\?"),
        ({"n": 3}, TypeError, r"was given 'n', [\s\S]*it takes rounds, budget_s"),
        ({"rounds": -1}, ValueError, "rounds is -1\n  at .*\n  give a whole number, 0 for a prediction alone"),
        ({"budget_s": 0}, ValueError, "budget_s is 0\n  at .*\n  give a number of seconds above 0, or leave it out"),
    ],
)
def test_a_keyword_that_cannot_be_is_refused(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        dflow.explain_placement(lambda x, *, scale=1: x * scale, 1.0, **given)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"explain_placement was given 3, which is no function\n  at .*:\d+"):
        dflow.explain_placement(3)  # type: ignore[arg-type]
