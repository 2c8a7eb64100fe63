"""Variables, queues, accumulators and containers in traced code: graphs as text, their results, and errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.errors import (
    AccumulatorError,
    ContainerError,
    DeadlineExceeded,
    InternalError,
    ParseError,
    QueueError,
    VariableError,
    VerifyError,
)
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.types import AccumulatorType, ArrayType, QueueType, RowsType, parse_type
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.context import current_home
from dflow.tracing.state.resources import Variable, read
from dflow.tracing.state.variable_trees import variables
from dflow.tracing.syntax.text import parse, text
from dflow.tracing.syntax.verify import verify
from tests.graphs_ import a_home
from tests.reference.accumulator_model import AccumulatorModel
from tests.reference.interpret import interpret
from tests.reference.queue_model import QueueModel

LOOP = """graph(%q: queue<i32[]>, %n: i32[]) {
 !%sum: i32[] = ctrl.while(%q, %n, 0:i32[]) {carry=1} {
    graph(%q: queue<i32[]>, %n: i32[], %c: i32[]) {
      %1: bool[] = jax.lt(%c, %n)
      return %1
    }
    graph(%q: queue<i32[]>, %n: i32[], %c: i32[]) {
     !%1: i32[] = queue.dequeue(%q)
     !%2: token = queue.enqueue(%q, %c)
      %3: i32[] = jax.add(%c, %1)
      return %3
    }
  }
  return %sum
}"""

ROWS = """graph(%q: queue<i32[]>, %x: i32[3]) {
 !%last: i32[], %all: i32[3] = ctrl.scan(%q, 0:i32[], %x) {carry=1, length=3, reverse=True, rows=1} {
    graph(%q: queue<i32[]>, %c: i32[], %row: i32[]) {
     !%1: i32[] = queue.dequeue(%q)
      %2: i32[] = jax.mul(%row, %1)
      return %1, %2
    }
  }
  return %last, %all
}"""

BRANCH = """graph(%q: queue<i32[]>, %i: i32[]) {
 !%taken: i32[] = ctrl.cond(%i, %q) {
    graph(%q: queue<i32[]>) {
     !%1: i32[] = queue.size(%q)
      return %1
    }
    graph(%q: queue<i32[]>) {
     !%1: i32[] = queue.dequeue(%q)
      return %1
    }
  }
  return %taken
}"""


def run(graph: str, *inputs: object) -> tuple[list[object], list[int]]:
    """Run a graph over a queue of 1, 2, 3; return its results and the elements that remain."""
    queue = QueueModel(QueueSettings(QueueKind.FIFO, 8), [(np.int32(n),) for n in (1, 2, 3)])
    outputs, state = interpret(parse(graph), inputs, {"q": queue})
    assert [int(number) for (number,) in queue.elements] == [1, 2, 3]
    return [np.asarray(output).tolist() for output in outputs], [int(number) for (number,) in state["q"].elements]


@pytest.mark.parametrize("graph", [LOOP, ROWS, BRANCH])
def test_a_graph_with_bodies_is_read_back(graph: str) -> None:
    verify(parse(graph))
    assert text(parse(graph)) == graph


def test_bodies_run_turn_by_turn() -> None:
    assert run(LOOP, np.int32(5)) == ([6], [0, 1, 3])
    assert run(LOOP, np.int32(0)) == ([0], [1, 2, 3])
    assert run(ROWS, np.array([10, 20, 30], np.int32)) == ([3, [30, 40, 30]], [])
    assert run(BRANCH, np.int32(0)) == ([3], [1, 2, 3])
    assert run(BRANCH, np.int32(7)) == ([1], [2, 3])


def test_a_queue_type_is_read_back() -> None:
    type = QueueType((ArrayType(np.dtype("float32"), (3, None)), ArrayType(np.dtype("int32"), ())))
    assert str(type) == "queue<f32[3,?], i32[]>"
    assert parse_type(str(type)) == type
    with pytest.raises(ParseError, match="is not a type"):
        parse_type("queue<token>")


@pytest.mark.parametrize(
    ("graph", "old", "new", "message"),
    [
        (LOOP, "return %1\n", "return %c\n", r"the test gives \(i32\[\]\) where \(bool\[\]\) is wanted"),
        (LOOP, "return %3", "return %3, %1", r"the body gives \(i32\[\], i32\[\]\) where \(i32\[\]\) is wanted"),
        (LOOP, "%n: i32[]) {\n !", "%n: f32[]) {\n !", r"its body takes \(queue<i32\[\]>, i32\[\], i32\[\]\) and was"),
        (LOOP, "queue.enqueue(%q, %c)", "queue.enqueue(%q)", r"the element is \(\) but the queue holds \(i32\[\]\)"),
        (LOOP, "= queue.dequeue(%q)", "= queue.dequeue(%c)", r"the first operand is i32\[\], not a queue"),
        (LOOP, "queue.enqueue(%q, %c)", "queue.enqueue(%c, %c)", r"the first operand is i32\[\], not a queue"),
        (ROWS, "length=3", "length=4", r"a row of 4 is to be taken from i32\[3\]"),
        (ROWS, "%all: i32[3]", "%all: i32[4]", r"gives i32\[\], i32\[3\] but its results are i32\[\], i32\[4\]"),
        (BRANCH, "%i: i32[]", "%i: f32[]", r"the index gives \(f32\[\]\) where \(i32\[\]\) is wanted"),
        (BRANCH, "return %1\n    }\n  }", "return\n    }\n  }", r"a body gives \(\) where \(i32\[\]\) is wanted"),
        (
            BRANCH.replace("queue<i32[]>", "queue<i32[?]>"),
            "",
            "",
            r"queue<i32\[\?\]> have no one shape",
        ),
    ],
)
def test_a_malformed_graph_is_refused_with_the_reason(graph: str, old: str, new: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(parse(graph.replace(old, new)))


TYPE = "accumulator<f32[], 2 rows of f32[5,1]>"

GRAPH = f"""graph(%g: {TYPE}, %x: f32[], %i: i32[3], %r: f32[3,1]) {{
 !%s: i32[] = accumulator.step(%g)
 !%fresh: bool[] = accumulator.apply(%g, %x, %i, %r, %s)
 !%stale: bool[] = accumulator.apply(%g, %x, %i, %r, -1:i32[])
 !%again: bool[] = accumulator.apply(%g, 3.0:f32[], %i, %r, 7:i32[])
 !%n: i32[] = accumulator.count(%g)
 !%1: f32[], %2: i32[2], %3: f32[2,1] = accumulator.take(%g) {{count=2}}
 !%d: i32[] = accumulator.dropped(%g)
 !%4: token = accumulator.set_step(%g, %n)
  return %fresh, %stale, %again, %1, %2, %3, %d
}}"""


def run_accumulators(graph: str, indices: list[int]) -> tuple[list[Any], AccumulatorModel]:
    parsed = parse(graph)
    held: Any = parsed.refs[0].type
    model = AccumulatorModel(held, AccumulatorSettings(Reduction.MEAN))
    inputs = [np.float32(1), np.array(indices, np.int32), np.ones((3, 1), np.float32)]
    outputs, state = interpret(parsed, inputs, {"g": model})
    assert (model.step, model.dropped, model.gradients) == (0, 0, [])
    return [np.asarray(output).tolist() for output in outputs], state["g"]


def test_a_graph_is_read_back_and_means_what_its_ops_say() -> None:
    verify(parse(GRAPH))
    assert text(parse(GRAPH)) == GRAPH
    outputs, left = run_accumulators(GRAPH, [4, 1, 4])
    assert outputs == [True, False, True, 2.0, [1, 4], [[1.0], [2.0]], 1]
    assert (left.step, left.dropped, left.gradients) == (2, 1, [])
    assert run_accumulators(GRAPH, [3, 3, 3])[0][4:6] == [[3, 0], [[3.0], [0.0]]]


def test_an_interpreted_wait_and_too_many_rows_are_errors() -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"node %1 \(accumulator\.take\): a take of 3 waits for ever: it holds 2"
    ):
        run_accumulators(GRAPH.replace("count=2", "count=3"), [1, 1, 1])
    with pytest.raises(AccumulatorError, match="it would hold 3 different rows, but a take gives 2 rows of f32"):
        run_accumulators(GRAPH, [1, 2, 3])


def test_an_accumulator_type_is_read_back() -> None:
    f32 = np.dtype("float32")
    type = AccumulatorType((ArrayType(f32, ()), RowsType(2, ArrayType(f32, (5, 1)))))
    assert str(type) == TYPE
    assert parse_type(TYPE) == type
    for wrong in ("accumulator<token>", "accumulator<x rows of f32[3]>", "accumulator<2 rows of token>"):
        with pytest.raises(ParseError, match="is not a"):
            parse_type(wrong)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(%g, %x, %i, %r, %s)", "(%g, %x, %i, %r)", r"the step is f32\[3,1\], not i32\[\]"),
        ("(%g, %x, %i, %r, %s)", "(%g, %x, %i, %s)", r"the gradient is \(f32\[\], i32\[3\]\) but accumulator"),
        (
            "%r: f32[3,1]",
            "%r: f32[4,1]",
            r"the gradient is \(f32\[\], i32\[3\], f32\[4,1\]\) but accumulator<f32\[\], 2",
        ),
        ("accumulator.count(%g)", "accumulator.count(%s)", r"the first operand is i32\[\], not an accumulator"),
        ("accumulator.set_step(%g, %n)", "accumulator.set_step(%g, %x)", r"the step is f32\[\], not i32\[\]"),
        ("%2: i32[2]", "%2: i32[3]", r"its results are f32\[\], i32\[3\]"),
    ],
)
def test_a_malformed_graph_of_accumulators_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(parse(GRAPH.replace(old, new)))


KEPT = f"""graph(%g: {TYPE}, %x: f32[], %i: i32[3], %r: f32[3,1], %o: f32[1], %t: i32[3]) {{
 !%1: i32[] = accumulator.keep(%g, %x, %i, %r, 4:i32[])
 !%2: i32[] = accumulator.keep(%g, 7.0:f32[], %i, %r, 4:i32[])
 !%3: i32[] = accumulator.keep(%g, 3.0:f32[], 1:i32[], %o, 4:i32[])
 !%4: i32[] = accumulator.keep(%g, %x, %i, %r, 3:i32[])
 !%5: f32[], %6: i32[2], %7: f32[2,1] = accumulator.take_kept(%g, %t)
 !%8: i32[] = accumulator.step(%g)
 !%9: i32[] = accumulator.dropped(%g)
  return %1, %2, %3, %4, %5, %6, %7, %8, %9
}}"""


def test_a_graph_with_kept_gradients_is_read_back_and_means_what_its_ops_say() -> None:
    verify(parse(KEPT))
    assert text(parse(KEPT)) == KEPT
    parsed = parse(KEPT)
    held: Any = parsed.refs[0].type
    inputs = [np.float32(1), np.array([4, 1, 4], np.int32), np.ones((3, 1), np.float32), np.ones(1, np.float32)]

    def run_accumulators(*tickets: int) -> list[Any]:
        model = AccumulatorModel(held, AccumulatorSettings(Reduction.MEAN))
        outputs, _ = interpret(parsed, [*inputs, np.array(tickets, np.int32)], {"g": model})
        return [np.asarray(output).tolist() for output in outputs]

    assert run_accumulators(1, 3, 0) == [1, 2, 3, 0, 2.0, [1, 4], [[1.0], [1.0]], 5, 2]
    for tickets in ((0, 0, 0), (1, 1, 0), (1, 4, 0), (0, 1, 3)):
        with pytest.raises(AccumulatorError, match=r"take_kept: expected distinct tickets of \[1, 2, 3\], got "):
            run_accumulators(*tickets)
    for old, new, message in [
        ("%t: i32[3]", "%t: i32[]", r"accumulator.take_kept: the tickets are i32\[\], not one row of i32"),
        ("%t: i32[3]", "%t: f32[3]", r"the tickets are f32\[3\], not one row of i32"),
        ("(%g, %x, %i, %r, 3:i32[])", "(%g, %x, %i, %r, %x)", r"accumulator.keep: the step is f32\[\], not i32"),
    ]:
        with pytest.raises(VerifyError, match=message):
            verify(parse(KEPT.replace(old, new)))


WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    gc.collect()
    assert dflow.containers() == ()
    yield
    gc.collect()


def test_names_begin_with_the_container_and_nest() -> None:
    with dflow.container("run1"):
        w = dflow.Variable(0.0, name="w")
        with dflow.container("eval"):
            v = dflow.Variable(0.0, name="v")
        unnamed = dflow.Variable(0.0)
    outside = dflow.Variable(0.0, name="w")
    assert [w.name, v.name, outside.name] == ["run1/w", "run1/eval/v", "w"]
    assert unnamed.name.startswith("run1/variable_")
    assert dflow.containers() == ("run1", "run1/eval")
    assert "%run1/w" in str(dflow.graph(lambda: w.read() + 1))


def test_a_container_is_there_as_long_as_something_in_it_is() -> None:
    with dflow.container("a/b"):
        assert dflow.containers() == ()
        w = dflow.Variable(0.0)
    alive = weakref.ref(w)
    assert dflow.containers() == ("a", "a/b")
    del w
    gc.collect()
    assert alive() is None
    assert dflow.containers() == ()


def test_after_a_reset_every_use_says_what_happened_and_what_to_do() -> None:
    with dflow.container("run1"):
        w = dflow.Variable(jnp.ones(2), name="w")
        with dflow.container("inner"):
            v = dflow.Variable(0.0, name="v")
    kept = dflow.Variable(1.0, name="kept")
    step = dflow.jit(lambda: w.assign_add(jnp.ones(2)))
    step()
    dflow.reset_container("run1")
    message = (
        r"variable .run1/w. is gone: container .run1. was reset at test_resources.py:\d+\n"
        r"  at .*test_resources.py:\d+\n  make it again"
    )
    for use in (w.read, step, lambda: w.assign(jnp.zeros(2)), lambda: w.assign_add(jnp.zeros(2)), lambda: w + 1):
        with pytest.raises(VariableError, match=message):
            use()
    with pytest.raises(VariableError, match="variable 'run1/inner/v' is gone: container 'run1' was reset"):
        v.read()
    assert float(kept.read()) == 1.0
    assert dflow.containers() == ()


def test_an_inner_container_is_reset_alone_and_a_longer_name_is_another() -> None:
    made = {}
    for name in ("run1", "run1/eval", "run10"):
        with dflow.container(name):
            made[name] = dflow.Variable(1.0, name="w")
    dflow.reset_container("run1/eval")
    assert dflow.containers() == ("run1", "run10")
    dflow.reset_container("run1")
    assert float(made["run10"].read()) == 1.0
    assert dflow.containers() == ("run10",)


def test_a_queue_belongs_to_its_container_and_a_reset_ends_its_waits() -> None:
    with dflow.container("run1"):
        queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.float32), name="q")
    assert (queue.name, dflow.containers()) == ("run1/q", ("run1",))
    begun = dflow.FIFOQueue(1, jax.ShapeDtypeStruct((), jnp.float32), name="begun")

    @dflow.jit
    def step() -> Any:
        begun.enqueue(1.0)
        return jax.lax.fori_loop(0, 2, lambda _, c: c + queue.dequeue(timeout_s=WAIT_S), 0.0)

    message = (
        r"queue 'run1/q' is gone: container 'run1' was reset at test_resources.py:\d+\n"
        r"  at .*test_resources.py:\d+\n  make it again"
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(step)
        begun.dequeue(timeout_s=WAIT_S)
        queue.enqueue(1.0)
        dflow.reset_container("run1")
        with pytest.raises(QueueError, match=message):
            waiting.result(WAIT_S)
    for use in (step, queue.dequeue, lambda: queue.enqueue(1.0), queue.size, queue.close):
        with pytest.raises(QueueError, match=message):
            use()
    assert dflow.containers() == ()


def test_a_container_that_is_not_there_or_has_no_name_is_refused() -> None:
    with dflow.container("here"):
        w = dflow.Variable(0.0)
    with pytest.raises(ContainerError, match=r"no container 'there'; there are: here\n  at .*test_resources.py"):
        dflow.reset_container("there")
    del w
    for name in ("", "a//b", "/a", "a b", "a/"):
        with pytest.raises(ContainerError, match="is not a container's name"), dflow.container(name):
            pass


@pytest.fixture
def w() -> Variable:
    with a_home():
        return Variable(jnp.arange(3.0), name="w")


def test_python_scalars_take_the_variables_dtype() -> None:
    with a_home():
        half = Variable(jnp.zeros((), jnp.bfloat16), name="half")
    half.assign_add(2.5)
    half.assign_add(1)
    assert half.read() == 3.5
    assert half.read().dtype == jnp.bfloat16


def test_a_variable_is_not_made_inside_traced_code() -> None:
    def step(x: Any) -> Any:
        return Variable(x, name="inner").read()

    with (
        a_home(),
        pytest.raises(VariableError, match=r"\(inner\) is created inside traced code(.|\n)*create it before"),
    ):
        jax.make_jaxpr(step)(1.0)


def test_a_variable_is_an_argument_a_result_and_twice_the_same(w: Variable) -> None:
    def step(tree: Any, again: Variable, x: Any) -> Any:
        tree["w"].assign_add(x)
        again.assign_add(x)
        return again, tree["w"].read()

    traced = trace(step, ({"w": w}, w, np.ones(3, np.float32)), {})
    assert traced.variables == (w,)
    assert [str(value.type) for value in traced.graph.inputs] == ["ref<f32[3]>", "f32[3]"]
    outputs, state = interpret(traced.graph, [np.ones(3, np.float32)], {"w": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(state["w"], [2.0, 2.0, 2.0])
    returned, value = jax.tree.unflatten(traced.out_tree, outputs)
    assert returned is w
    np.testing.assert_array_equal(value, [2.0, 2.0, 2.0])


def test_a_tree_of_arrays_becomes_a_tree_of_named_variables() -> None:
    with a_home():
        made = variables({"dense": [jnp.ones(2), lambda: jnp.zeros(3)]}, prefix="model/")
    assert [v.name for v in jax.tree.leaves(made, is_leaf=lambda v: isinstance(v, Variable))] == [
        "model/dense/0",
        "model/dense/1",
    ]
    jax.tree.map(np.testing.assert_array_equal, read(made), {"dense": [jnp.ones(2), jnp.zeros(3)]})


def test_an_initial_value_may_be_a_function_and_has_the_dtype() -> None:
    with a_home():
        made = Variable(lambda: jnp.ones(2), dtype=jnp.float16)
        near = Variable(0, near=made)
    assert str(made.type) == "f16[2]"
    assert made.name.startswith("variable_")
    assert near.home is made.home
    assert str(near.type) == "i32[]"


def test_without_a_home_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.tracing.state.context._default", [])
    with pytest.raises(InternalError, match="no home for variables is set; import dflow"):
        current_home()
