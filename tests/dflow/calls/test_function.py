"""Functions by `dflow.jit`: arguments, results, their stages before a call, methods, and JAX inside and around."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.testing import memory_cluster
from dflow.tracing.errors import PlainJitError


def test_variables_are_arguments_even_twice_and_results() -> None:
    v = dflow.Variable(jnp.zeros(2))

    @dflow.jit
    def f(first: dflow.Variable, pair: dict[str, Any]) -> Any:
        first.assign_add(jnp.ones(2))
        seen = pair["again"].read()
        pair["again"].assign(seen * 10)
        return pair["again"], seen, {"v": v}

    result, seen, tree = f(v, {"again": v, "other": 1.0})
    assert result is v
    assert tree["v"] is v
    np.testing.assert_array_equal(seen, [1, 1])
    np.testing.assert_array_equal(v, [10, 10])


def test_a_failed_call_changes_no_variable_and_may_be_tried_again() -> None:
    v, fail = dflow.Variable(1.0), [True]

    @dflow.jit
    def f() -> None:
        v.assign(5.0)
        if fail[0]:
            raise ValueError("not yet")

    with pytest.raises(ValueError, match="not yet"):
        f()
    assert float(v) == 1.0
    fail[0] = False
    f()
    assert float(v) == 5.0


@pytest.mark.device
def test_arrays_read_earlier_stay_valid() -> None:
    given = jnp.full(3, 7.0)
    v = dflow.Variable(given)
    before = v.read()

    @dflow.jit
    def step() -> Any:
        v.assign_add(jnp.ones(3))
        return v.read()

    results = [step() for _ in range(3)]
    np.testing.assert_array_equal([given, before, *results, v], np.array([7, 7, 8, 9, 10, 10])[:, None] * np.ones(3))


@pytest.mark.device
def test_arguments_that_become_state_stay_the_callers() -> None:
    first, second = dflow.Variable(jnp.zeros(2)), dflow.Variable(jnp.zeros(2))

    @dflow.jit
    def keep(x: Any) -> Any:
        first.assign(x)
        second.assign(x)
        return x

    @dflow.jit
    def grow() -> None:
        first.assign_add(jnp.ones(2))
        second.assign_add(jnp.ones(2) * 2)

    mine = jnp.full(2, 5.0)
    returned = keep(mine)
    grow()
    grow()
    np.testing.assert_array_equal([mine, returned, first, second], [[5, 5], [5, 5], [7, 7], [9, 9]])


@pytest.mark.parametrize("keep", [lambda v: v, lambda v: {"deep": [v, 1.0]}], ids=["itself", "in a tree"])
def test_a_variable_that_was_an_argument_is_freed_with_its_last_user(keep: Callable[[Any], Any]) -> None:
    f = dflow.jit(lambda tree: jax.tree.leaves(tree, is_leaf=dflow.is_variable)[0].assign_add(1.0))
    v = dflow.Variable(1.0)
    for _ in range(2):
        f(keep(v))
    assert float(v) == 3.0
    gone = weakref.ref(v)
    del v
    gc.collect()
    assert gone() is None
    assert f._plans.is_empty


def test_a_signature_says_what_is_static() -> None:
    """Positions count all parameters, positional-only parameters too."""
    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x, /, n: [x + v] * n, static_argnames="n")
    assert len(f(1.0, 2)) == 2
    assert len(f(1.0, n=3)) == 3


def test_a_copy_of_a_function_runs_by_itself() -> None:
    import copy

    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x: v.assign_add(x * 1))
    f(1.0)
    again = copy.deepcopy(f)
    again(1.0)
    assert again is not f
    assert float(v) == 3.0
    assert (len(f.trace_log()), len(again.trace_log())) == (1, 1)


def test_a_plain_jit_inside_keeps_its_state() -> None:
    v = dflow.Variable(jnp.zeros(2))

    @jax.jit
    def add(x: Any) -> Any:
        v.assign_add(x)
        return v.read() + 1

    @dflow.jit
    def step(x: Any) -> Any:
        return add(x), add(x)

    first, second = step(jnp.ones(2))
    np.testing.assert_array_equal([first, second], [[2, 2], [3, 3]])
    np.testing.assert_array_equal(v, [2, 2])


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": jax.vmap,
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_a_function_with_state_is_compiled_once(
    transform: Any, caplog: pytest.LogCaptureFixture
) -> None:
    v, table = dflow.Variable(2.0, name="v"), jnp.array([1.0, 3.0])
    transformed = transform(dflow.jit(lambda x: (x * v * table).sum()))
    points = jnp.ones(2)
    expected = transform(lambda x: (x * 2.0 * table).sum())(points)
    for value in (2.0, 3.0):
        v.assign(value)
        with jax.log_compiles():
            caplog.clear()
            got = transformed(points)
        np.testing.assert_allclose(got, expected * value / 2)
    assert "Finished XLA compilation" not in caplog.text


def test_what_a_transform_was_compiled_for_is_gone_with_the_function() -> None:
    v = dflow.Variable(jnp.ones((7, 77)), name="v")
    gone = weakref.ref(v)
    f = dflow.jit(lambda x, v=v: (x * v).sum())
    jax.grad(f)(2.0)
    jax.vmap(f)(jnp.ones(2))
    del f, v
    gc.collect()
    assert gone() is None
    assert not [array for array in jax.live_arrays() if array.shape == (7, 77)]


class Counter:
    """An object that is not a pytree."""

    def __init__(self, traced: list[Any] | None = None) -> None:
        self.total = dflow.Variable(jnp.zeros(2), name=f"total_{id(self)}")
        self.traced = traced if traced is not None else []

    @dflow.jit
    def add(self, x: Any, *, times: Any = 1.0) -> Any:
        """Add to the total."""
        self.traced.append(type(x))
        self.total.assign_add(x * times)
        return self.total.read()

    @classmethod
    @dflow.jit
    def double(cls, x: Any) -> Any:
        """Double."""
        return 2 * x

    @staticmethod
    @dflow.jit
    def half(x: Any) -> Any:
        """Halve."""
        return x / 2


def test_a_method_of_a_plain_object_has_that_objects_state() -> None:
    first, second = Counter(), Counter()
    np.testing.assert_array_equal(first.add(jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(first.add(jnp.ones(2), times=2.0), [3, 3])
    np.testing.assert_array_equal(second.add(jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(first.add(jnp.ones(2)), [4, 4])
    assert len(first.traced) == 2
    assert len(second.traced) == 1
    assert (float(Counter.double(2.0)), float(Counter().half(2.0))) == (4.0, 1.0)
    assert Counter.add.__doc__ == "Add to the total."
    np.testing.assert_array_equal(Counter().add(jnp.ones(2)), [1, 1])


def test_a_method_does_not_keep_its_object_alive() -> None:
    counter = Counter()
    counter.add(jnp.ones(2))
    alive, variable = weakref.ref(counter), weakref.ref(counter.total)
    del counter
    gc.collect()
    assert alive() is None
    assert variable() is None


def test_a_copied_object_does_not_run_the_methods_of_the_first() -> None:
    import copy

    first = Counter()
    first.add(jnp.ones(2))
    second = copy.copy(first)
    second.total = dflow.Variable(jnp.full(2, 5.0))
    np.testing.assert_array_equal(second.add(jnp.ones(2)), [6, 6])
    np.testing.assert_array_equal(first.total, [1, 1])


def test_a_bound_method_is_a_value_like_others() -> None:
    import copy

    first, second = Counter(), Counter()
    assert first.add == first.add != second.add
    assert {first.add: 1}[first.add] == 1
    assert (first.add.__name__, first.add.__doc__, first.add.__module__) == ("add", "Add to the total.", __name__)
    np.testing.assert_array_equal(copy.copy(first.add)(jnp.ones(2)), [1, 1])
    traces = []

    @functools.partial(dflow.jit, static_argnums=0)
    def apply(method: Any, x: Any) -> Any:
        traces.append(1)
        return method(x)

    for _ in range(3):
        apply(first.add, jnp.ones(2))
    assert (traces, first.total.read().tolist()) == ([1], [4, 4])


def test_a_bound_method_is_exported_drawn_and_placed_like_a_function() -> None:
    counter, spec = Counter(), dflow.spec((2,), jnp.float32)
    assert "add(x: f32[2])" in str(dflow.export(counter.add, spec))
    assert "var.assign_add(%" in str(dflow.graph(counter.add, jnp.ones(2)))
    assert counter.add.lower(jnp.ones(2)).as_text().count("func.func public") == 1


class Slotted:
    """An object without weak references."""

    __slots__ = ("total",)

    @dflow.jit
    def double(self, x: Any) -> Any:
        """Twice as much."""
        return x * 2


def test_a_method_of_an_object_without_weak_references_says_what_to_do() -> None:
    with pytest.raises(dflow.DflowError, match=r'Slotted takes no weak references[\s\S]*add "__weakref__"'):
        Slotted().double(1.0)


@jax.tree_util.register_pytree_node_class
class Scale:
    """An object that is a pytree: its arrays are arguments."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def tree_flatten(self) -> Any:
        """Return the one array."""
        return (self.factor,), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Scale:
        """Rebuild the object."""
        return cls(*leaves)

    @dflow.jit
    def times(self, x: Any) -> Any:
        """Multiply."""
        return self.factor * x


def test_a_method_of_a_pytree_takes_its_arrays_as_arguments() -> None:
    scale = Scale(jnp.float32(2.0))
    assert float(scale.times(3.0)) == 6.0
    scale.factor = jnp.float32(5.0)
    assert float(scale.times(3.0)) == 15.0


X = np.arange(3, dtype=np.float32)


def counter() -> tuple[Any, dflow.Variable]:
    total = dflow.Variable(jnp.zeros(3), name="total")

    @dflow.jit
    def count(x: Any, *, scale: Any = 1.0) -> Any:
        total.assign_add(x * scale)
        return {"total": total.read()}

    return count, total


def test_what_is_compiled_ahead_runs_as_the_function_does() -> None:
    count, total = counter()
    compiled = count.lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    for times, x in enumerate((X, jnp.asarray(X), X), 1):
        np.testing.assert_array_equal(compiled(x)["total"], times * X)
    np.testing.assert_array_equal(total, 3 * X)
    assert len(count.trace_log()) == 1


def test_each_stage_tells_of_the_arguments_and_results_as_jax_does() -> None:
    count, _ = counter()
    plain = jax.jit(lambda x, *, scale: {"total": x * scale})
    ours, theirs = count.trace(X, scale=2.0), plain.trace(X, scale=2.0)
    for _ in range(3):
        assert (ours.in_tree, ours.out_tree) == (theirs.in_tree, theirs.out_tree)
        assert jax.tree.map(lambda info: (info.shape, info.dtype), ours.out_info) == {"total": ((3,), np.float32)}
        assert str(ours.args_info) == str(theirs.args_info)
        if hasattr(ours, "lower"):
            ours, theirs = ours.lower(), theirs.lower()
        elif hasattr(ours, "compile"):
            ours, theirs = ours.compile(), theirs.compile()


def test_the_program_can_be_read_and_its_cost_asked() -> None:
    count, total = counter()
    lowered = count.lower(X)
    assert lowered.as_text().count("stablehlo.add") == 1
    assert "HloModule" in lowered.as_text("hlo")
    compiled = lowered.compile()
    assert "HloModule" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] >= 3.0
    assert compiled.memory_analysis().alias_size_in_bytes == 12
    np.testing.assert_array_equal(total, 0 * X)


def test_a_function_with_a_queue_is_several_programs() -> None:
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((3,), jnp.float32), name="q")
    v = dflow.Variable(jnp.zeros(3), name="v")

    @dflow.jit
    def step(x: Any) -> Any:
        queue.enqueue(jnp.sin(x))
        v.assign_add(queue.dequeue())
        return jnp.cos(x)

    lowered = step.lower(X)
    assert {"sine", "cosine", "add"} <= {word.split(".")[-1] for word in lowered.as_text().split() if "." in word}
    compiled = lowered.compile()
    np.testing.assert_allclose(compiled(X), np.cos(X), rtol=1e-6)
    np.testing.assert_allclose(v, np.sin(X), rtol=1e-6)
    assert compiled.cost_analysis()["flops"] > 0
    with pytest.raises(dflow.DflowError, match=r"step is \d programs, which are not all in memory at once"):
        compiled.memory_analysis()


def test_arguments_that_were_not_compiled_for_are_refused() -> None:
    count, total = counter()
    compiled = count.lower(X).compile()
    with pytest.raises(TypeError, match=r"count was compiled for args/0: f32\[3\], and called with f32\[4\]") as caught:
        compiled(jnp.zeros(4))
    assert f"{Path(__file__).name}:" in str(caught.value)
    with pytest.raises(TypeError, match=r"compiled for arguments of the structure .* and called with"):
        compiled(X, scale=2.0)
    np.testing.assert_array_equal(total, 0 * X)


def test_static_and_donated_arguments() -> None:
    v = dflow.Variable(1.0, name="v")
    f = dflow.jit(lambda n, x: x * n + v, static_argnums=0, donate_argnums=1)
    compiled = f.lower(3, jnp.ones(4)).compile()
    given = jnp.ones(4)
    np.testing.assert_array_equal(compiled(given), [4.0] * 4)
    assert given.is_deleted()


@pytest.mark.parametrize(("platform", "op"), [("cpu", "cosine"), ("cuda", "sine"), ("tpu", "tanh")])
def test_a_function_with_state_is_lowered_for_platforms_that_are_not_here(platform: str, op: str) -> None:
    total = dflow.Variable(jnp.ones(3), name="total")

    def by_platform(x: Any) -> None:
        total.assign_add(jax.lax.platform_dependent(x, cpu=jnp.cos, cuda=jnp.sin, tpu=jnp.tanh))

    text = dflow.jit(by_platform).trace(X).lower(lowering_platforms=(platform,)).as_text()
    assert [name for name in ("cosine", "sine", "tanh") if f"stablehlo.{name} " in text] == [op]
    np.testing.assert_array_equal(total, np.ones(3))


def test_jax_export_of_a_function_with_state_names_what_exports_it() -> None:
    count, _ = counter()
    with pytest.raises(PlainJitError) as caught:
        jax.export.export(count)(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert re.sub(r"\n  at .*test_function.py:\d+", "", str(caught.value)) == (
        "count has state, and jax.export does not know where it is\n"
        "  export it by dflow.export(fn, *specs), which keeps the state beside the program"
    )


def test_a_step_on_a_cluster_is_lowered_by_task() -> None:
    with memory_cluster(ps=2) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            w = dflow.Variable(lambda: jnp.ones(3), name="w")
            calls = dflow.Variable(0, name="calls")
        here = dflow.Variable(jnp.zeros(3), name="here")

        @dflow.jit
        def step(x: Any) -> Any:
            calls.assign_add(1)
            here.assign_add(x)
            w.assign_add(jnp.sin(x))
            return {"total": here.read().sum()}

        lowered = step.lower(X)
        assert lowered.out_info["total"].shape == ()
        own, first, second = re.split("^// ps:[01]\n", lowered.as_text(), flags=re.MULTILINE)
        assert own.startswith("// worker:0\n")
        assert "stablehlo.sine" in own
        assert "//   Send(" in own
        for part in (first, second):
            assert part.count("module @jit_step") == part.count("stablehlo.add") == 1
        assert lowered.as_text("hlo").count("HloModule") >= 3
        assert lowered.cost_analysis()["flops"] >= 7.0
        assert int(calls.read()) == 0

        compiled = lowered.compile()
        for number in (1, 2):
            np.testing.assert_allclose(compiled(X)["total"], number * X.sum())
            np.testing.assert_allclose(w, 1 + number * np.sin(X), rtol=1e-6)
        assert int(calls.read()) == 2
        for ask in (compiled.as_text, compiled.cost_analysis, compiled.memory_analysis):
            with pytest.raises(PlainJitError, match=r"step runs on several tasks(.|\n)*lower\(...\) gives the text"):
                ask()


def test_what_tasks_compile_for_themselves_is_refused_when_it_is_asked_for() -> None:
    with memory_cluster(ps=1) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            w = dflow.Variable(lambda: jnp.ones(3), name="w")
        double = dflow.jit(lambda: w.assign_add(w.read()))
        with pytest.raises(dflow.DflowError, match=r"takes no compiler_options\n  at .*test_function.py"):
            double.lower().compile({"xla_cpu_enable_fast_math": True})
        for_tpu = double.trace().lower(lowering_platforms=("tpu",))
        assert "// ps:0" in for_tpu.as_text()
        with pytest.raises(dflow.DflowError, match=r"was lowered for tpu(.|\n)*without lowering_platforms"):
            for_tpu.compile()
