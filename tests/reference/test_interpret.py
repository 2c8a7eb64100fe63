"""The reference semantics beside programs run by Python; verify, interpret and discharge beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

from dflow.tracing.derivatives.discharge import State, evaluate
from dflow.tracing.jax_frontend import make_jaxpr
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.context import home
from dflow.tracing.state.resources import Variable
from dflow.tracing.syntax.text import parse
from dflow.tracing.syntax.verify import verify
from tests.effort import examples
from tests.graphs_ import Case, DictHome, a_home, case_of, cases
from tests.programs.draw import programs
from tests.programs.machines import AtOnce, Traced
from tests.programs.made import ARGUMENTS, initial_values, variables_of
from tests.programs.statements import Program
from tests.reference.interpret import interpret, interpret_parts


def by_name(variables: Any, values: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {variable.name: np.asarray(value) for variable, value in zip(variables, values, strict=True)}


def run_eagerly(program: Program) -> tuple[list[Any], dict[str, Any]]:
    """Run each op immediately, on values of a state backend, with Python's control flow."""
    with a_home():
        variables = variables_of(program)
    outputs = program(AtOnce(variables), *map(jnp.asarray, ARGUMENTS))
    return [*map(np.asarray, outputs)], by_name(variables, [variable.read() for variable in variables])


def run_discharged(program: Program) -> tuple[list[Any], dict[str, Any]]:
    """Run the discharged pure function, compiled as one program."""
    with a_home():
        variables = variables_of(program)
    machine = Traced(variables)
    jaxpr, consts, _ = make_jaxpr(lambda x, y: program(machine, x, y), *ARGUMENTS)

    def pure(values: list[Any], *args: Any) -> Any:
        state = State(zip(variables, values, strict=True))
        return evaluate(jaxpr, consts, args, state), state.of(variables)

    outputs, after = jax.jit(pure)([variable.read() for variable in variables], *ARGUMENTS)
    return [*map(np.asarray, outputs)], by_name(variables, after)


def run_interpreted(case: Case) -> tuple[list[Any], Mapping[str, Any]]:
    outputs, after = interpret(case.graph, case.inputs, case.state)
    return [*map(np.asarray, outputs)], {name: np.asarray(value) for name, value in after.items()}


def assert_same(one: Any, other: Any) -> None:
    """Assert equal outputs, and equal state of the variables in both; a graph omits variables that it does not use."""
    for left, right in zip(one[0], other[0], strict=True):
        np.testing.assert_array_equal(left, right)
    for name in {*one[1]} & {*other[1]}:
        np.testing.assert_array_equal(one[1][name], other[1][name], err_msg=name)


@given(programs())
@settings(max_examples=examples(10))
def test_discharged_eager_and_interpreted_programs_agree(program: Program) -> None:
    eager = run_eagerly(program)
    case = case_of(program)
    assert_same(run_interpreted(case), eager)
    assert_same(run_discharged(program), eager)
    first = dict(zip(eager[1], initial_values(program), strict=True))
    untouched = {name: eager[1][name] for name in {*eager[1]} - {*case.state}}
    assert_same(([], untouched), ([], first))


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


def test_a_call_runs_its_body_on_the_variables_it_is_given() -> None:
    graph = parse("""
        graph(%v: ref<f32[]>, %w: ref<f32[]>, %x: f32[]) {
         !%1: f32[] = xla.call(%w, %x, %v) {donate=(0,)} {
            graph(%a: ref<f32[]>, %b: f32[], %c: ref<f32[]>) {
             !%1: f32[] = var.read(%c)
              %2: f32[] = jax.add(%1, %b)
             !%3: token = var.assign(%a, %2)
              return %2
            }
          }
          return %1
        }""")
    verify(graph)
    assert interpret(graph, [3.0], {"v": 4.0, "w": 0.0}) == ([7.0], {"v": 4.0, "w": 7.0})


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
