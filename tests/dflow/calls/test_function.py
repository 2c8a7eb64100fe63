"""`dflow.jit` in one process: when it traces, what goes in and out, and what it leaves intact."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.errors import DeviceError, DflowError, VariableError, VariableShapeError

DEADLINE_S = 100.0
HERE = Path(__file__).name


class Traces:
    """Counts how often the function it wraps is traced."""

    def __init__(self, fn: Any) -> None:
        self.count = 0
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._fn(*args, **kwargs)


def line_of(error: BaseException) -> str:
    """The line of this file that the message names."""
    lines = [line for line in str(error).splitlines() if line.startswith("  at ") and HERE in line]
    assert lines, error
    number = int(lines[0].rpartition(":")[2])
    return Path(__file__).read_text().splitlines()[number - 1].strip()


# When it traces.


@pytest.mark.parametrize("has_state", [False, True], ids=["without state", "with state"])
def test_same_types_do_not_trace_again_and_new_ones_do(has_state: bool) -> None:
    factor = dflow.Variable(2)
    traces = Traces(lambda x: x * (factor.read() if has_state else 2))
    f = dflow.jit(traces)
    for value in (np.ones(3, np.float32), jnp.zeros(3), np.zeros(3, np.float32)):
        f(value)
    counted = traces.count
    assert counted <= 2, "NumPy and JAX arrays of one type may be told apart, once"
    f(np.ones((2, 3), np.float32))
    assert traces.count == counted + 1
    assert f(np.ones(3, np.int32)).dtype == jnp.int32
    assert traces.count == counted + 2
    f(np.full(3, 7, np.float32))
    f(jnp.array([7.0, 8.0, 9.0]))
    assert traces.count == counted + 2


def test_another_structure_is_another_trace() -> None:
    traces = Traces(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    f = dflow.jit(traces)
    assert f({"a": 1.0, "b": (2.0,)}) == {"a": 2.0, "b": (3.0,)}
    assert f({"a": 5.0, "b": (6.0,)}) == {"a": 6.0, "b": (7.0,)}
    assert f([1.0, None]) == [2.0, None]
    assert traces.count == 2


def test_python_numbers_stay_weak_and_are_not_baked_in() -> None:
    traces = Traces(lambda x, y: x * y)
    f = dflow.jit(traces)
    half = jnp.ones(2, jnp.bfloat16)
    assert f(half, 3.0).dtype == jnp.bfloat16
    assert float(f(half, 4.0)[0]) == 4.0
    assert traces.count == 1
    assert f(half, jnp.float32(3.0)).dtype == jnp.float32
    assert traces.count == 2
    assert jax.jit(lambda x: x + 1)(2).weak_type == dflow.jit(lambda x: x + 1)(2).weak_type is True


def test_closed_over_arrays_and_variables_are_not_traced_per_value() -> None:
    weights, rows = dflow.Variable(jnp.ones(3)), jnp.arange(3.0)
    traces = Traces(lambda x: (weights.read() * rows).sum() + x)
    f = dflow.jit(traces)
    assert float(f(1.0)) == 4.0
    weights.assign(2 * jnp.ones(3))
    assert float(f(1.0)) == 7.0
    assert traces.count == 1


# What goes in and out.


def test_keyword_arguments_in_any_order() -> None:
    traces = Traces(lambda *, a, b: a - b)
    f = dflow.jit(traces)
    assert float(f(a=3.0, b=1.0)) == 2.0
    assert float(f(b=1.0, a=3.0)) == 2.0
    assert traces.count == 1


def test_defaults_varargs_and_partials() -> None:
    @dflow.jit
    def f(x: Any, *rest: Any, scale: Any = 2.0, **more: Any) -> Any:
        return scale * (x + sum(rest)), more

    total, more = f(1.0, 2.0, 3.0, extra=4.0)
    assert (float(total), {name: float(value) for name, value in more.items()}) == (12.0, {"extra": 4.0})
    assert float(dflow.jit(functools.partial(lambda a, b: a - b, 5.0))(2.0)) == 3.0


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


def test_another_variable_is_another_trace() -> None:
    first, second = dflow.Variable(1.0), dflow.Variable(2.0)
    traces = Traces(lambda v: v.assign_add(1.0))
    f = dflow.jit(traces)
    for variable in (first, second, first):
        f(variable)
    assert (float(first), float(second)) == (3.0, 3.0)
    assert traces.count == 2


def test_results_may_be_arguments_constants_and_nothing() -> None:
    x = jnp.arange(3.0)
    assert dflow.jit(lambda: None)() is None
    same, constant, number = dflow.jit(lambda a: (a, np.float32(2.0), 3))(x)
    np.testing.assert_array_equal(same, x)
    assert (float(constant), int(number)) == (2.0, 3)


def test_prng_keys_and_bfloat16_are_held() -> None:
    key = dflow.Variable(jax.random.key(7), name="key")
    half = dflow.Variable(jnp.ones(2, jnp.bfloat16), name="half")

    @dflow.jit
    def draw() -> Any:
        following, now = jax.random.split(key.read())
        key.assign(following)
        half.assign_add(jnp.ones(2, jnp.bfloat16))
        return jax.random.normal(now, (2,))

    expected_key, expected = jax.random.key(7), []
    for _ in range(3):
        expected_key, now = jax.random.split(expected_key)
        expected.append(jax.random.normal(now, (2,)))
    np.testing.assert_allclose([draw() for _ in range(3)], expected, rtol=1e-6)
    assert bool((jax.random.key_data(key.read()) == jax.random.key_data(expected_key)).all())
    assert half.read().dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(half.read(), np.float32), [4, 4])


# Methods.


class Counter:
    """An object that is no pytree."""

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


class Slotted:
    """An object that takes no weak references."""

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
        """Its one array."""
        return (self.factor,), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Scale:
        """Back again."""
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


# Together with JAX's own transforms, and with itself.


def test_nested_functions_share_state_in_program_order() -> None:
    v = dflow.Variable(1.0)

    @dflow.jit
    def inner(x: Any) -> Any:
        v.assign_add(x)
        return v.read()

    @dflow.jit
    def outer(x: Any) -> Any:
        before = v.read()
        first = inner(x)
        v.assign(v.read() * 10)
        return before, first, inner(x)

    assert [float(x) for x in outer(1.0)] == [1.0, 2.0, 21.0]
    assert float(inner(1.0)) == 22.0
    assert [float(x) for x in outer(1.0)] == [22.0, 23.0, 231.0]


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


def test_inside_grad_and_vmap_of_a_stateless_function() -> None:
    f = dflow.jit(lambda x: jnp.sin(x) * x)
    points = jnp.linspace(0.0, 1.0, 5)
    np.testing.assert_allclose(jax.vmap(f)(points), jnp.sin(points) * points, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(0.3), jnp.cos(0.3) * 0.3 + jnp.sin(0.3), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(f)))(points), jnp.cos(points) * points + jnp.sin(points))
    assert jax.eval_shape(f, jax.ShapeDtypeStruct((3,), jnp.float32)).shape == (3,)


def test_transforms_inside_read_variables() -> None:
    v = dflow.Variable(jnp.arange(3.0))

    @dflow.jit
    def f(x: Any) -> Any:
        rows = jax.vmap(lambda row: row @ v)(x)
        slope = jax.grad(lambda scale: (scale * v.read()).sum())(2.0)
        return rows, slope, jax.lax.fori_loop(0, 3, lambda i, total: total + v[i], 0.0)

    rows, slope, looped = f(jnp.ones((2, 3)))
    np.testing.assert_allclose(rows, [3, 3])
    assert (float(slope), float(looped)) == (3.0, 3.0)


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


def test_plain_jit_over_a_variable_is_refused_with_the_remedy() -> None:
    v = dflow.Variable(jnp.ones(2), name="weights")

    def read(x: Any) -> Any:
        return x + v.read()

    def write(x: Any) -> None:
        v.assign_add(x)

    for fn in (read, write):
        with pytest.raises(DflowError, match=r"variable 'weights' is used in a function that JAX compiles") as caught:
            jax.jit(fn)(jnp.ones(2))
        assert "decorate the outermost function with @dflow.jit" in str(caught.value)
        assert "or pass it the variable as an argument" in str(caught.value)
        assert HERE in str(caught.value)


def test_an_exception_in_the_function_keeps_its_traceback() -> None:
    @dflow.jit
    def fails(x: Any) -> Any:
        return helper(x)

    def helper(x: Any) -> Any:
        raise ZeroDivisionError(f"mine, with {x.shape}")

    with pytest.raises(ZeroDivisionError, match=r"mine, with \(2,\)") as caught:
        fails(jnp.ones(2))
    mine = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__) if HERE in frame.filename]
    assert mine[-2:] == ["fails", "helper"]
    assert float(dflow.jit(lambda x: x)(1.0)) == 1.0, "the failed trace has left nothing behind"


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


# What it leaves intact.


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


# Variables outside of any function.


def test_eager_arithmetic_comparison_and_indexing() -> None:
    v, w = dflow.Variable(jnp.array([1.0, 2.0])), dflow.Variable(jnp.array([3.0, 4.0]))
    np.testing.assert_array_equal(v + 1, [2, 3])
    np.testing.assert_array_equal(1 - v, [0, -1])
    np.testing.assert_array_equal(v * w, [3, 8])
    np.testing.assert_array_equal(np.array([10.0, 20.0], np.float32) * v, [10, 40])
    np.testing.assert_array_equal(2**v, [2, 4])
    np.testing.assert_array_equal(-v, [-1, -2])
    np.testing.assert_array_equal(v < w, [True, True])
    assert float(v @ w) == 11.0
    assert float(v[1]) == 2.0
    np.testing.assert_array_equal(v[::-1], [2, 1])
    assert (v.shape, v.ndim, v.size, len(v), v.dtype) == ((2,), 1, 2, 2, jnp.float32)


def test_eager_conversion_to_numpy_and_python() -> None:
    v = dflow.Variable(jnp.array([1.0, 2.0]), name="v")
    np.testing.assert_array_equal(np.asarray(v), [1, 2])
    assert np.asarray(v, dtype=np.float64).dtype == np.float64
    assert [float(x) for x in v] == [1.0, 2.0]
    assert float(dflow.Variable(1.5)) == 1.5
    assert int(dflow.Variable(3)) == 3
    assert "abcd"[dflow.Variable(2)] == "c"
    assert f"{dflow.Variable(1.25):.1f}" == "1.2"
    assert not dflow.Variable(False)
    assert repr(v) == f"{v}" == "<Variable 'v': f32[2]>"
    assert v in [v]
    assert v != dflow.Variable(jnp.array([1.0, 2.0]))


def test_an_empty_truth_is_numpys_to_say() -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        bool(dflow.Variable(jnp.ones(2)))


# Bad input, with the user's line.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (jnp.ones(3), r"holds f32\[2\] but assign was given f32\[3\]"),
        (jnp.ones(2, jnp.int32), r"holds f32\[2\] but assign was given i32\[2\]"),
        (jnp.ones(2, jnp.bfloat16), r"holds f32\[2\] but assign was given bf16\[2\]"),
        (1.0, r"holds f32\[2\] but assign was given"),
    ],
)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_wrong_shape_or_dtype_is_refused(value: Any, text: str, traced: bool) -> None:
    v = dflow.Variable(jnp.zeros(2), name="v")

    def write(x: Any) -> None:
        v.assign(x)

    with pytest.raises(VariableShapeError, match=text) as caught:
        (dflow.jit(write) if traced else write)(value)
    assert line_of(caught.value) == "v.assign(x)"
    np.testing.assert_array_equal(v, [0, 0])


def test_one_name_with_two_types_is_refused_with_both_lines() -> None:
    first = dflow.Variable(jnp.zeros(2), name="taken")
    with pytest.raises(VariableError, match=r"'taken' holds f32\[2\], but is created again with f32\[3\]") as caught:
        dflow.Variable(jnp.zeros(3), name="taken")
    assert str(caught.value).count(HERE) == 2
    assert line_of(caught.value).startswith("dflow.Variable(jnp.zeros(3)")
    again = dflow.Variable(jnp.ones(2), name="taken")
    with pytest.warns(dflow.DuplicateNameWarning, match="'taken'"):
        np.testing.assert_array_equal([first, again], [[0, 0], [1, 1]])


def test_a_variable_inside_traced_code_is_refused() -> None:
    with pytest.raises(VariableError, match=r"a variable .* is created inside traced code") as caught:
        dflow.jit(lambda: dflow.Variable(1.0, name="late"))()
    assert "late" in str(caught.value)
    assert "dflow.Variable(1.0" in line_of(caught.value)


def test_a_device_name_that_cannot_be_read() -> None:
    with pytest.raises(DeviceError, match="'gpu' is not the name of a device; write") as caught, dflow.device("gpu"):
        pass
    assert "/job:ps/task:0" in str(caught.value)
    assert 'dflow.device("gpu")' in line_of(caught.value)


def test_a_device_that_no_task_offers_alone() -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("/job:ps/task:7"):
            return x + 1

    with pytest.raises(DeviceError, match="placed on /job:ps/task:7, but no task offers it; the tasks are ") as caught:
        f(1.0)
    assert line_of(caught.value) == "return x + 1"


# Dumps and checks, which are read from the environment.

SCRIPT = """
import jax.numpy as jnp
import dflow
v = dflow.Variable(jnp.zeros(2), name="v")
@dflow.jit
def step(x):
    v.assign_add(jnp.broadcast_to(x, (2,)))
    return v.read()
step(jnp.ones(2)); step(jnp.ones(2))
step(jnp.float32(1.0))
"""

BREAK = """
import dataclasses, jax.numpy as jnp
import dflow
from dflow.lowering.passes.prune import Prune
from dflow.tracing.ir.graph import Graph
Prune.__call__ = lambda self, graph: Graph(graph.inputs, graph.nodes[::-1], graph.outputs)
print(dflow.jit(lambda x: jnp.sin(x) * 2)(1.0))
"""


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", script]
    env = {"PATH": "", "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_a_dump_has_one_file_a_pass(tmp_path: Path) -> None:
    ran = python(SCRIPT, DFLOW_DUMP=str(tmp_path), DFLOW_CHECK="1")
    assert ran.returncode == 0, ran.stderr
    folders = sorted(folder.name for folder in tmp_path.iterdir())
    assert folders == ["000-step", "001-step"]
    files = sorted(file.name for file in (tmp_path / "000-step").iterdir())
    stages = [
        "traced",
        "prune",
        "merge",
        "choose",
        "place",
        "fold",
        "repeat",
        "partition",
        "order",
        "cluster",
        "schedule",
        "donate",
    ]
    assert files == [f"{number:02d}-{stage}.graph" for number, stage in enumerate(stages)]
    traced = (tmp_path / "000-step" / "00-traced.graph").read_text()
    assert "var.assign_add(%v" in traced
    assert traced.startswith("graph(")


def test_a_check_blames_the_pass_that_breaks_a_graph() -> None:
    ran = python(BREAK, DFLOW_CHECK="1")
    assert ran.returncode == 1
    assert "VerifyError" in ran.stderr
    assert "after the pass 'prune'; the graph was valid before it" in ran.stderr


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


def test_a_variable_closed_over_lives_as_long_as_the_function() -> None:
    def made() -> Any:
        v = dflow.Variable(1.0, name="kept")
        return dflow.jit(lambda x: v + x)

    f = made()
    f(1.0)
    gc.collect()
    assert float(f(2.0)) == 3.0


# What it is called, and what it is a copy of.


def test_a_program_is_called_as_its_function(caplog: pytest.LogCaptureFixture) -> None:
    v = dflow.Variable(1.0)

    @dflow.jit
    def my_step(x: Any) -> Any:
        return x + v

    with jax.log_compiles():
        my_step(1.0)
    assert "Compiling jit(my_step)" in caplog.text


def test_a_signature_says_what_is_static() -> None:
    """Positions count all parameters, those that are positional only too."""
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
