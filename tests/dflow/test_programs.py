"""Random programs with state give equal results: compiled, op by op, eager, interpreted, lowered, and by JAX alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

import dflow
from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import pipeline
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.syntax.text import parse, text
from dflow.tracing.syntax.verify import verify
from tests.effort import examples
from tests.programs.draw import programs
from tests.programs.machines import AtOnce, Traced
from tests.programs.made import (
    ARGUMENTS,
    accumulator_of,
    cell_of_accumulator,
    cells_of,
    cells_of_queues,
    contents,
    contents_of_model,
    model_of,
    plain,
    queues_of,
    variables_of,
)
from tests.programs.reference import InexactError, Reference
from tests.programs.statements import Call, Cond, Derive, Loop, Program, Read, Write
from tests.reference.interpret import interpret

# No program may leave a value of its trace in an object of dflow.
pytestmark = pytest.mark.usefixtures("all_holders")

#: Number of runs of each program, each on the state that the previous run left.
TIMES = 2
Outcome = tuple[list[Any], list[Any], list[Any], list[Any]]


def resources_of(program: Program) -> tuple[Any, Any, Any]:
    """The variables, queues and accumulator of a program."""
    return variables_of(program), queues_of(program), accumulator_of(program)


def hosts_of(machine: Traced) -> list[Any]:
    """Return the queues of a machine, and its accumulator."""
    return [*machine.queues, *[machine.accumulator] * (machine.accumulator is not None)]


def by_reference(program: Program) -> list[Outcome]:
    """Return results, printed values, and final state of each run by the reference."""
    machine = Reference(cells_of(program), cells_of_queues(program), cell_of_accumulator(program))
    models = [cell.model for cell in hosts_of(machine)]
    outcomes = []
    for _ in range(TIMES):
        machine.seen.clear()
        outputs = program(machine, *map(jnp.asarray, ARGUMENTS))
        held = [*map(contents_of_model, models)]
        outcomes.append((plain(outputs), [*machine.seen], plain(cell.value for cell in machine.variables), held))
    return outcomes


def by_running(program: Program, how: str) -> list[Outcome]:
    """Return the same for the program over variables, queues and an accumulator of this process."""
    machine = (AtOnce if how == "at once" else Traced)(*resources_of(program))
    donated = {"compiled": (), "donating": (0, 1)}.get(how)
    fn: Any = lambda x, y: program(machine, x, y)  # noqa: E731
    step = fn if how == "at once" else dflow.jit(fn, donate_argnums=donated or ())
    outcomes = []
    for _ in range(TIMES):
        machine.seen.clear()
        outputs = step(*map(jnp.array, ARGUMENTS))
        jax.effects_barrier()
        held = [*map(contents, hosts_of(machine))]
        outcomes.append((plain(outputs), [*machine.seen], plain(v.read() for v in machine.variables), held))
    return outcomes


def by_graphs(program: Program) -> tuple[list[Outcome], list[Outcome]]:
    """Return the same for the program's graph, interpreted after the trace and after every pass."""
    machine = Traced(*resources_of(program))
    traced = trace(lambda x, y: program(machine, x, y), ARGUMENTS, {})
    verify(traced.graph)
    lowered = run_passes(traced.graph, pipeline(), check=True)
    for graph in (traced.graph, lowered):
        assert text(parse(text(graph))) == text(graph)
    models = {resource: model_of(resource) for resource in hosts_of(machine)}
    names = {resource: ref.name for ref, resource in zip(traced.graph.refs, traced.variables, strict=True)}
    first = {name: models[r] if isinstance(r, HostResource) else r.read() for r, name in names.items()}

    def runs(graph: Any) -> list[Outcome]:
        state, outcomes = first, []
        for _ in range(TIMES):
            machine.seen.clear()
            outputs, state = interpret(graph, [*traced.constants, *map(jnp.asarray, ARGUMENTS)], state)
            jax.effects_barrier()
            values = [state[names[v]] if v in names else v.read() for v in machine.variables]
            held = [contents_of_model(state[names[r]] if r in names else model) for r, model in models.items()]
            outcomes.append((plain(outputs), [*machine.seen], plain(values), held))
        return outcomes

    return runs(traced.graph), runs(lowered)


def meaning(program: Program) -> list[Outcome]:
    """Return the expected outcome of every run. Rejects a program that float32 does not represent exactly."""
    try:
        return by_reference(program)
    except InexactError:
        reject()


def check_compiled(program: Program, how: str) -> None:
    wanted = meaning(program)
    traced, lowered = by_graphs(program)
    assert traced == wanted, "the graph, interpreted"
    assert lowered == wanted, "the graph after the pipeline, interpreted"
    assert by_running(program, how) == wanted, how


def check_eager(program: Program) -> None:
    wanted = meaning(program)
    assert by_running(program, "at once") == wanted, "at once"
    with dflow.eager():
        assert by_running(program, "eager") == wanted, "eager"


#: Writes the last value to a variable, and reads it.
_WRITES = (Write(0, -1, "assign_add"), Read(0))
#: Derivatives through loops, branches and calls that write variables, and through later reads of these.
DERIVED = Program(
    (("float32", (3,)), ("float32", ())),
    tuple(
        Derive("value_and_grad", 0, (0, 1), (part, Write(1, -1, "assign_add"), Read(1)))
        for part in (
            *(Loop(how, 0, 2, _WRITES) for how in ("scan", "map", "fori", "bounded")),
            Cond(0, (_WRITES, (Read(1),))),
            Call("checkpoint", 0, (Loop("scan", -1, 2, _WRITES),)),
            Call("jit", -1, (Call("custom_jvp", -1, _WRITES), Read(0))),
        )
    ),
)

ANY = programs(host_state="some", logs=True)
#: Other programs have few statements of host state, and fewer of these in loops and branches.
OF_HOST_STATE = programs(most=4, host_state="mostly")


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*makes a new function of it each time")
@settings(max_examples=examples(25))
@given(program=ANY, donates=st.booleans())
@example(program=DERIVED, donates=False)
def test_a_compiled_program_does_what_jax_alone_would_do(program: Program, donates: bool) -> None:
    check_compiled(program, "donating" if donates else "compiled")


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*makes a new function of it each time")
@settings(max_examples=examples(25))
@given(program=OF_HOST_STATE)
def test_a_compiled_program_of_queues_and_an_accumulator_does_what_its_models_do(program: Program) -> None:
    check_compiled(program, "compiled")


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*makes a new function of it each time")
@settings(max_examples=examples(20))
@given(program=programs(most=3, host_state="some", logs=True) | programs(most=3, host_state="mostly"))
def test_an_eager_program_does_what_jax_alone_would_do(program: Program) -> None:
    check_eager(program)
