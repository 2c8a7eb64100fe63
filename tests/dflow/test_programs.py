"""Random programs with state mean one thing: compiled, run at once, eagerly, interpreted, lowered, and by JAX alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import dflow
from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import pipeline
from dflow.tracing.interpret import interpret
from dflow.tracing.queues import Queue
from dflow.tracing.text import parse, text
from dflow.tracing.trace import trace
from dflow.tracing.verify import verify
from tests.effort import examples
from tests.programs.draw import programs
from tests.programs.machines import AtOnce, Traced
from tests.programs.made import (
    ARGUMENTS,
    cells_of,
    contents,
    models_of,
    plain,
    queue_cells_of,
    queues_of,
    variables_of,
)
from tests.programs.reference import InexactError, Reference
from tests.programs.statements import Program

#: How often each is run, on the state that the run before has left.
TIMES = 2
Outcome = tuple[list[Any], list[Any], list[Any], list[Any]]


def by_reference(program: Program) -> list[Outcome]:
    """What each run gives, shows, and leaves in the variables and the queues."""
    machine = Reference(cells_of(program), queue_cells_of(queues_of(program)))
    outcomes = []
    for _ in range(TIMES):
        machine.seen.clear()
        outputs = program(machine, *map(jnp.asarray, ARGUMENTS))
        held = [[plain(element) for element in cell.model.elements] for cell in machine.queues]
        outcomes.append((plain(outputs), [*machine.seen], plain(cell.value for cell in machine.variables), held))
    return outcomes


def by_running(program: Program, how: str) -> list[Outcome]:
    """The same of the program over variables and queues of this process."""
    machine = (AtOnce if how == "at once" else Traced)(variables_of(program), queues_of(program))
    donated = {"compiled": (), "donating": (0, 1)}.get(how)
    fn: Any = lambda x, y: program(machine, x, y)  # noqa: E731
    step = fn if how == "at once" else dflow.jit(fn, donate_argnums=donated or ())
    outcomes = []
    for _ in range(TIMES):
        machine.seen.clear()
        outputs = step(*map(jnp.array, ARGUMENTS))
        jax.effects_barrier()
        held = [contents(queue) for queue in machine.queues]
        outcomes.append((plain(outputs), [*machine.seen], plain(v.read() for v in machine.variables), held))
    return outcomes


def by_graphs(program: Program) -> tuple[list[Outcome], list[Outcome]]:
    """The same of the program's graph, interpreted as it was traced and as it is after every pass."""
    machine = Traced(variables_of(program), queues_of(program))
    traced = trace(lambda x, y: program(machine, x, y), ARGUMENTS, {})
    verify(traced.graph)
    lowered = run_passes(traced.graph, pipeline(), check=True)
    for graph in (traced.graph, lowered):
        assert text(parse(text(graph))) == text(graph)
    models = dict(zip(machine.queues, models_of(machine.queues), strict=True))
    names = {resource: ref.name for ref, resource in zip(traced.graph.refs, traced.variables, strict=True)}
    first = {name: models[r] if isinstance(r, Queue) else r.read() for r, name in names.items()}

    def runs(graph: Any) -> list[Outcome]:
        state, outcomes = first, []
        for _ in range(TIMES):
            machine.seen.clear()
            outputs, state = interpret(graph, [*traced.constants, *map(jnp.asarray, ARGUMENTS)], state)
            jax.effects_barrier()
            values = [state[names[v]] if v in names else v.read() for v in machine.variables]
            left = [state[names[q]] if q in names else models[q] for q in machine.queues]
            held = [[plain(element) for element in model.elements] for model in left]
            outcomes.append((plain(outputs), [*machine.seen], plain(values), held))
        return outcomes

    return runs(traced.graph), runs(lowered)


def meaning(program: Program) -> list[Outcome]:
    """What every run must give. Rejects a program that float32 does not hold exactly."""
    try:
        return by_reference(program)
    except InexactError:
        reject()


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*makes a new function of it each time")
@settings(max_examples=examples(40))
@given(program=programs(queues=True, logs=True), donates=st.booleans())
def test_a_compiled_program_does_what_jax_alone_would_do(program: Program, donates: bool) -> None:
    wanted = meaning(program)
    traced, lowered = by_graphs(program)
    assert traced == wanted, "the graph, interpreted"
    assert lowered == wanted, "the graph after the pipeline, interpreted"
    assert by_running(program, "donating" if donates else "compiled") == wanted, "compiled"


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*makes a new function of it each time")
@settings(max_examples=examples(25))
@given(program=programs(most=3, queues=True, logs=True))
def test_an_eager_program_does_what_jax_alone_would_do(program: Program) -> None:
    wanted = meaning(program)
    assert by_running(program, "at once") == wanted, "at once"
    with dflow.eager():
        assert by_running(program, "eager") == wanted, "eager"
