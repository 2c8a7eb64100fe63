"""Branches and loops on several tasks: their results in every order of the tasks, and the values that they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import dflow
from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import pipeline
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.compile_plan import run_of
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.context import home
from tests.effort import examples
from tests.graphs_ import DictHome
from tests.lowering.meaning import (
    PS_0,
    PS_1,
    TASKS,
    WORKER,
    assert_equal_states,
    assert_equal_values,
    assert_same_meaning,
    chooser,
)
from tests.lowering.one_process import Cluster, Mailbox
from tests.reference.interpret import interpret

#: The variables that a program may use, each on its own task.
State = tuple[dflow.Variable, ...]
#: A statement takes these and a number of the program, and returns the next number.
Statement = Callable[[State, Any], Any]


@dataclass(frozen=True)
class Do:
    """A statement, with the draw that made it."""

    text: str
    run: Statement

    def __repr__(self) -> str:
        return self.text


def _read(index: int) -> Do:
    return Do(f"read {index}", lambda state, x: x + state[index].read())


def _write(index: int, kind: str) -> Do:
    def run(state: State, x: Any) -> Any:
        getattr(state[index], kind)(x)
        return x - 1

    return Do(f"{kind} {index}", run)


def _on(task: str) -> Do:
    def run(_: State, x: Any) -> Any:
        with dflow.device(task):
            return x * 3

    return Do(f"on {task}", run)


def _all(parts: Sequence[Do]) -> Do:
    def run(state: State, x: Any) -> Any:
        for part in parts:
            x = part.run(state, x)
        return x

    return Do(f"{list(parts)}", run)


def _cond(arms: Sequence[Do]) -> Do:
    def run(state: State, x: Any) -> Any:
        return lax.switch(x % len(arms), [lambda x, arm=arm: arm.run(state, x) for arm in arms], x)

    return Do(f"switch {list(arms)}", run)


def _scan(body: Do, length: int, parallel: int) -> Do:
    def run(state: State, x: Any) -> Any:
        def turn(carry: Any, row: Any) -> Any:
            first, second = carry
            after = body.run(state, first + row)
            return (second, after), after * 2

        with dflow.parallel_iterations(parallel):
            (first, second), rows = lax.scan(turn, (x, x + 1), jnp.arange(length, dtype=jnp.int32) - x)
        return first + second + rows.sum()

    return Do(f"scan {length} {body}", run)


def _while(body: Do, tested: int | None, length: int) -> Do:
    def run(state: State, x: Any) -> Any:
        def test(carry: Any) -> Any:
            left, _ = carry
            return (left > 0) & (True if tested is None else state[tested].read() % 7 != 3)

        return lax.while_loop(test, lambda c: (c[0] - 1, body.run(state, c[1])), (jnp.int32(length), x))[1]

    return Do(f"while {length} {tested} {body}", run)


_INDEX = st.integers(0, 2)


def _statements(depth: int) -> st.SearchStrategy[Do]:
    simple = st.one_of(
        st.builds(_read, _INDEX),
        st.builds(_write, _INDEX, st.sampled_from(["assign", "assign_add", "assign_max"])),
        st.builds(_on, st.sampled_from(["ps:0", "ps:1"])),
    )
    if depth == 0:
        return st.lists(simple, min_size=1, max_size=4).map(_all)
    inner = _statements(depth - 1)
    some = st.one_of(
        simple,
        st.builds(_cond, st.lists(inner, min_size=2, max_size=3)),
        st.builds(_scan, inner, st.integers(0, 3), st.sampled_from([1, 2, 10])),
        st.builds(_while, inner, st.one_of(st.none(), _INDEX), st.integers(0, 3)),
    )
    return st.lists(some, min_size=1, max_size=3).map(_all)


@dataclass(frozen=True, eq=False)
class Traced:
    """A program's graph and its inputs."""

    graph: Graph
    inputs: list[Any]
    state: dict[str, Any]


def traced(program: Callable[[State, Any], Any], where: Sequence[str | None] = (PS_0, PS_1, None)) -> Traced:
    """Return the traced program over variables on these tasks."""
    with home(DictHome(where)):
        state = tuple(dflow.Variable(jnp.int32(5 * index + 1), name=name) for index, name in enumerate("abc"))
    x = jnp.int32(2)
    made = trace(lambda x: program(state, x), [x], {})
    values = {ref.name: variable.read() for ref, variable in zip(made.graph.refs, made.variables, strict=True)}
    return Traced(made.graph, [*made.constants, x], values)


def run_both(case: Traced, seed: int, times: int = 2) -> Cluster:
    """Run the program on tasks and in one place; assert equal results in each of several steps."""
    cluster, state = Cluster(case.graph, case.state), case.state
    for step in range(times):
        wanted, state = interpret(case.graph, case.inputs, state)
        assert_equal_values(cluster.run(case.inputs, seed + step), wanted)
        assert_equal_states(cluster.state(), state)
    return cluster


def waited_for(cluster: Cluster, task: str) -> list[str]:
    """Return the edges whose values a task waits for after it has run alone as far as it can."""
    work: list[Callable[[], None]] = []
    ended: list[Any] = []
    channel = Mailbox(cluster.mail, task).channel
    store, step = cluster.stores[task], StepId(WORKER, 9)
    run_of(cluster._parts[task], store, channel, step, [], ended.append, work.append).start()
    while work:
        work.pop()()
    assert not ended
    return sorted(edge for _, edge, _, _ in cluster.mail.waiting)


def lowered(graph: Graph) -> Graph:
    return run_passes(graph, pipeline(WORKER, TASKS), check=True)


@settings(max_examples=examples(12), deadline=None)
@given(program=_statements(2), seed=st.integers(0, 1 << 16))
def test_any_program_does_on_tasks_what_it_does_in_one_place(program: Do, seed: int) -> None:
    case = traced(program.run)
    run_both(case, seed)
    assert_same_meaning(case.graph, lowered(case.graph), case.inputs, case.state, chooser(seed))


@pytest.mark.parametrize("parallel", [1, 3, 10])
def test_a_task_goes_ahead_as_many_turns_as_it_may(parallel: int) -> None:
    def program(state: State, x: Any) -> Any:
        def turn(_: Any, x: Any) -> Any:
            a, b, _ = state
            a.assign_mul(2)
            b.assign(a.read())
            return x

        with dflow.parallel_iterations(parallel):
            return lax.fori_loop(0, 6, turn, x)

    case = traced(program)
    waited = waited_for(Cluster(case.graph, case.state), PS_1)
    assert waited == [f"a@{turn}" for turn in range(min(parallel, 6))]


def test_turns_within_turns_that_are_under_way_together_wait_for_values_of_their_own() -> None:
    def program(_: State, x: Any) -> Any:
        def outer(nothing: int, row: Any) -> Any:
            def inner(nothing: int, number: Any) -> Any:
                with dflow.device("ps:0"):
                    sent = (row + number) * 2
                with dflow.device("ps:1"):
                    return nothing, sent * 3

            with dflow.parallel_iterations(2):
                return lax.scan(inner, nothing, jnp.arange(2, dtype=jnp.int32) + row)

        with dflow.parallel_iterations(2):
            return lax.scan(outer, 0, jnp.arange(3, dtype=jnp.int32) + x)[1].sum()

    cluster = run_both(traced(program), seed=0, times=1)
    assert waited_for(cluster, PS_1) == [f"jax.mul.2@{row}.{number}" for row in range(2) for number in range(2)]


def test_an_arm_that_is_not_taken_sends_nothing() -> None:
    def program(state: State, x: Any) -> Any:
        a, b, _ = state
        lax.cond(x > 100, lambda: a.assign(b.read()), lambda: None)
        return x

    cluster = run_both(traced(program), seed=0, times=1)
    assert {edge for action, edge in cluster.mail.log if action == "send"} == {"jax.convert_element_type.2"}


def test_each_edge_of_a_program_has_a_name_of_its_own() -> None:
    def program(state: State, x: Any) -> Any:
        a, b, _ = state

        def turn(_: Any, x: Any) -> Any:
            lax.cond(x > 0, lambda: a.assign(b.read()), lambda: b.assign(a.read()))
            return x + a.read()

        return lax.fori_loop(0, 2, turn, x + a.read()) + b.read()

    made = lowered(traced(program).graph)
    sent = [node.attributes["edge"] for node in within(made) if node.op is ops.net_send]
    received = [node.attributes["edge"] for node in within(made) if node.op is ops.net_recv]
    assert Counter(sent) == Counter(received)
    ways = Counter(
        (node.attributes["edge"], node.attributes["destination"]) for node in within(made) if node.op is ops.net_send
    )
    assert set(ways.values()) == {1}
    assert {node.op for node in within(made) if "tasks" in node.attributes} == {ops.ctrl_scan, ops.ctrl_cond}


def within(graph: Graph) -> list[Node]:
    """Return the nodes of a graph and of the bodies of its branches and loops."""
    found = list(graph.nodes)
    for node in graph.nodes:
        if node.op in ops.CONTROL_OPS:
            found += [inner for body in node.bodies for inner in within(body)]
    return found
