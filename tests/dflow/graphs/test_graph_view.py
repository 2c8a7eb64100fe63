"""`dflow.graph`: text and back, runs of any part, fed and fetched by name, and where each op is placed."""

from __future__ import annotations

from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.calls.single_executable import SingleExecutable
from dflow.graphs.placement_view import explained
from dflow.lowering.local import LocalHome
from dflow.lowering.passes.choose import Choose
from dflow.lowering.passes.place import Place
from dflow.lowering.pipeline import ALONE
from dflow.lowering.state.store import Store
from dflow.testing import memory_cluster
from dflow.tracing.errors import GraphNameError, GraphTypeError, ParseError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.syntax.text import parse
from tests.effort import examples
from tests.lowering.placement.given_costs import GivenCosts
from tests.programs.draw import programs
from tests.programs.machines import Traced
from tests.programs.made import ARGUMENTS, variables_of
from tests.programs.statements import Program
from tests.reference.interpret import interpret

HERE = Path(__file__).name


class Model:
    """A step whose values have names, on two variables."""

    def __init__(self) -> None:
        self.w = dflow.Variable(jnp.ones(3), name="w")
        self.steps = dflow.Variable(0, name="steps")
        self.ran: list[str] = []

    def step(self, x: Any) -> Any:
        hidden = dflow.name(x * self.w, "hidden")
        self.steps.assign_add(1)
        self.w.assign_add(hidden)
        tripled = jax.jit(lambda h: dflow.name(h * 3, "inside") + 1)(hidden)
        loss = dflow.name(tripled.sum(), "loss")
        return loss, self.w.read()

    def graph(self) -> dflow.GraphView:
        return dflow.graph(self.step, X)


X = np.arange(3, dtype=np.float32)


def plain(tree: Any) -> Any:
    return jax.tree.map(lambda array: np.asarray(array).tolist(), tree)


def test_a_value_is_fetched_by_its_name_with_or_without_the_sign() -> None:
    model = Model()
    assert plain(model.graph().run("hidden")) == plain(model.graph().run("%hidden")) == [0, 1, 2]
    assert plain(model.graph().run({"a": "loss", "b": ("hidden", "x")})) == {"a": 12, "b": ([0, 1, 2], [0, 1, 2])}


def test_what_is_not_needed_does_not_run() -> None:
    model = Model()
    model.graph().run(["loss", "hidden", "x"])
    assert (plain(model.w.read()), int(model.steps.read())) == ([1, 1, 1], 0)
    ran: list[int] = []

    def noisy(x: Any) -> Any:
        jax.debug.callback(lambda: ran.append(1))
        return dflow.name(x + 1, "next")

    assert int(dflow.graph(noisy, 1).run("next")) == 2
    jax.effects_barrier()
    assert ran == []


def test_a_write_is_run_by_fetching_it() -> None:
    model = Model()
    node = next(node for node in model.graph().graph.nodes if node.op.name == "var.assign_add")
    assert model.graph().run(node.outputs[0].name) is None
    assert (int(model.steps.read()), plain(model.w.read())) == (1, [1, 1, 1])


def test_a_variable_is_fetched_by_name_after_all_else() -> None:
    model = Model()
    assert plain(model.graph().run(["w", "steps"])) == [[1, 1, 1], 0]
    assert plain(model.graph().run(["w", "w_2", "w_1"])) == [[1, 2, 3], [1, 2, 3], [1, 1, 1]]
    odd = dflow.Variable(2.0, name="layer 0/w")
    assert float(dflow.graph(odd.read).run("layer 0/w")) == 2.0


def test_a_write_runs_though_what_it_gives_is_fed() -> None:
    table = dflow.Variable(jnp.zeros(2), name="table")

    def step() -> Any:
        table.assign(dflow.name(table.read() + 1, "next"))
        return dflow.name(table.read(), "after")

    view = dflow.graph(step)
    assert plain(view.run(["after", "next"], {"next": jnp.full(2, 5.0)})) == [[5, 5], [5, 5]]
    assert plain(table.read()) == [5, 5]


def test_a_value_inside_a_call_is_fetched_and_fed() -> None:
    model = Model()
    assert plain(model.graph().run("inside")) == [0, 3, 6]
    assert float(model.graph().run("loss", {"inside": jnp.ones(3)})) == 6
    constant = jnp.arange(40.0)
    nested = jax.jit(lambda x: jax.jit(lambda y: dflow.name(y * constant, "deep") + constant)(x) * 2)
    assert plain(dflow.graph(nested, 2.0).run("deep")) == plain(2 * constant)


def test_a_type_without_a_value_must_be_fed() -> None:
    view = dflow.graph(Model().step, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert plain(view.run("hidden", {"x": X})) == [0, 1, 2]
    with pytest.raises(GraphTypeError, match=r"%x: f32\[3\] is needed and has no value\n  at .*\n  give it in feeds"):
        view.run("hidden")


def test_a_name_that_is_not_there_is_refused_with_those_that_are_near() -> None:
    view = Model().graph()
    with pytest.raises(
        GraphNameError, match=rf"no value 'hiden' to be fed\n  at .*{HERE}:\d+\n  near it are %hidden at {HERE}:\d+$"
    ):
        view.run("loss", {"hiden": 1})
    with pytest.raises(
        GraphNameError, match=r"no value '%zzz' to be fetched\n  at .*\n  print the graph to see its values"
    ):
        view.run("%zzz")
    looped = dflow.graph(lambda: jax.lax.scan(lambda c, x: (dflow.name(c + x, "sum"), x), 0.0, jnp.ones(2)))
    with pytest.raises(GraphNameError, match=r"'sum' is in the body of %\w+ \(jax.scan at .*\), which runs as one"):
        looped.run("sum")


def test_a_feed_of_another_type_is_refused_with_both_types() -> None:
    view = Model().graph()
    with pytest.raises(
        GraphTypeError, match=rf"%hidden is f32\[3\] but was fed f32\[4\]\n  at .*{HERE}.*\n.*shape \(3,\)"
    ):
        view.run("loss", {"hidden": jnp.ones(4)})
    with pytest.raises(GraphTypeError, match=r"%hidden is f32\[3\] but was fed i32\[3\]\n(.|\n)*astype\(jnp.float32\)"):
        view.run("loss", {"hidden": np.arange(3)})
    with pytest.raises(GraphTypeError, match=r"%steps is i32\[\] but was fed ~f32\[\]"):
        view.run("steps", {"steps": 1.5})
    token = next(node for node in view.graph.nodes if not node.array_outputs).outputs[0].name
    with pytest.raises(GraphTypeError, match=rf"%{token} is a token, which has no value to feed"):
        view.run("loss", {token: 1})


def test_a_graph_read_from_text_runs_on_what_it_is_fed() -> None:
    model = Model()
    view = dflow.GraphView.parse(str(model.graph()))
    assert str(view) == str(model.graph())
    fed = {"x": X, "w": jnp.full(3, 2.0)}
    assert plain(view.run(["loss", "w_2", "inside"], fed)) == [21, [2, 4, 6], [0, 6, 12]]
    with pytest.raises(
        GraphTypeError, match=r"%w: ref<f32\[3\]> is needed, and a graph .* text has no variables(.|\n)*feeds"
    ):
        view.run("loss", {"x": X})
    with pytest.raises(ParseError, match="line 1"):
        dflow.GraphView.parse("graph(")


def test_a_part_runs_over_a_cluster() -> None:
    with memory_cluster(ps=1, workers=1) as cluster:
        worker = cluster.worker()
        with worker.parameter_servers():
            model = Model()
        view = model.graph()
        results = plain(view.run(["w_2", "loss"])), plain(view.run("w")), int(model.steps.read())
        worker.close()
    assert results == ([[1, 2, 3], 12], [1, 2, 3], 0)


def bound(program: Program) -> tuple[dflow.GraphView, list[dflow.Variable]]:
    machine = Traced(variables_of(program))
    return dflow.graph(lambda x, y: program(machine, x, y), *ARGUMENTS), machine.variables


def reference(graph: Graph, made: list[dflow.Variable]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the whole graph; return every array by name, and the state at the end."""
    values = [value for node in graph.nodes for value in node.outputs if isinstance(value.type, ArrayType)]
    state = {variable.name: variable.read() for variable in made if variable.name in {ref.name for ref in graph.refs}}
    results, after = interpret(Graph(graph.inputs, graph.nodes, tuple(values)), ARGUMENTS, state)
    return {value.name: np.asarray(result) for value, result in zip(values, results, strict=True)}, after


@settings(max_examples=examples(18))
@given(programs(most=3), st.data())
def test_each_value_is_what_the_whole_graph_gives(program: Program, data: st.DataObject) -> None:
    view, made = bound(program)
    values, after = reference(view.graph, made)
    names = data.draw(st.lists(st.sampled_from(sorted(values)), max_size=3)) if values else []
    fed = data.draw(st.sets(st.sampled_from(sorted(values)), max_size=2)) if values else set()
    tokens = [node.outputs[0].name for node in view.graph.nodes if not node.array_outputs]
    before = [variable.read() for variable in made]
    for name, result in zip(names, view.run(names, {name: values[name] for name in fed}), strict=True):
        np.testing.assert_array_equal(result, values[name])
    for variable, value in zip(made, before, strict=True):
        variable.assign(value)
    view.run([*tokens, *names])
    for name, value in after.items():
        np.testing.assert_array_equal(next(variable for variable in made if variable.name == name), value)


def test_the_same_part_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lower, compiled = Model(), LocalHome.lower, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return lower(*args, **kwargs)

    monkeypatch.setattr(LocalHome, "lower", counted)
    view = model.graph()
    for turn in range(1, 4):
        assert plain(view.run("hidden", {"x": X + turn})) == plain(X + turn)
        assert plain(view.run(["w_1", "w"], {"w": jnp.full(3, float(turn))})) == [[turn] * 3] * 2
    assert compiled == 2
    assert plain(model.w.read()) == [1, 1, 1]


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
