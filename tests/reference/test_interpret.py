"""The reference semantics of graphs that were cut apart and of effects; traced programs are well formed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, settings

from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.context import home
from dflow.tracing.state.resources import Variable
from dflow.tracing.syntax.text import parse
from dflow.tracing.syntax.verify import verify
from tests.effort import examples
from tests.graphs_ import Case, DictHome, cases
from tests.reference.interpret import interpret, interpret_parts


@given(cases(["ps:0", "ps:1"]))
@settings(max_examples=examples(25))
def test_every_traced_program_is_well_formed(case: Case) -> None:
    verify(case.graph)


CUT = (
    """
    graph(%x: f32[]) {
     !%1: f32[] = net.recv() {edge="back", source="/job:ps/task:0", types=(f32[],)}
     !%2: token = net.send(%x) {destination="/job:ps/task:0", edge="there"}
      return %1
    }""",
    """
    graph(%w: ref<f32[]>) {
     !%1: f32[] = net.recv() {edge="there", source="/job:worker/task:0", types=(f32[],)}
     !%2: token = var.assign_add(%w, %1)
     !%3: f32[] = var.read(%w)
     !%4: token = net.send(%3) {destination="/job:worker/task:0", edge="back"}
      return
    }""",
)


def test_graphs_that_were_cut_apart_run_as_the_values_arrive() -> None:
    worker, server = map(parse, CUT)
    outputs, state = interpret_parts([(worker, [2.0]), (server, [])], {"w": 40.0})
    assert outputs == [[42.0], []]
    assert state == {"w": 42.0}


ORDERED = """
graph(%w: ref<f32[]>, %x: f32[]) {{
 !%1: token = var.assign(%w, %x)
 !%2: f32[] = var.read(%w){after}
  return %2
}}"""


def test_with_a_choice_only_order_edges_hold_effects_apart() -> None:
    unordered, ordered = parse(ORDERED.format(after="")), parse(ORDERED.format(after="  after(%1)"))
    state = {"w": 1.0}
    assert interpret(unordered, [2.0], state)[0] == [2.0]
    assert interpret(unordered, [2.0], state, choose=lambda nodes: nodes[-1])[0] == [1.0]
    assert interpret(ordered, [2.0], state, choose=lambda nodes: nodes[-1])[0] == [2.0]


def test_an_op_with_unknown_effects_keeps_its_place() -> None:
    order: list[str] = []
    with home(DictHome()):
        w = Variable(jnp.zeros(()), name="w")

    def step(x: Any) -> Any:
        w.assign(x)
        jax.debug.callback(lambda value: order.append(f"saw {value}"), w.read())
        w.assign(x + 1)

    traced = trace(step, (1.0,), {})
    _, state = interpret(traced.graph, [1.0], {"w": 0.0})
    jax.effects_barrier()
    assert order == ["saw 1.0"]
    assert state == {"w": 2.0}
