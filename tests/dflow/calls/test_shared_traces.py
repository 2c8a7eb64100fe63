"""One Python function has one trace and one program, shared by calls, `lower` and `eval_shape`, as with `jax.jit`."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow

X = jnp.arange(3.0)


class Traced:
    """A function that counts how often it is traced, with or without state."""

    def __init__(self, has_state: bool) -> None:
        self.count, self.variable = 0, dflow.Variable(1.0)
        variable = self.variable

        def fn(x: Any) -> Any:
            self.count += 1
            return x * (variable if has_state else 2.0)

        self.fn = fn


@pytest.fixture(params=[False, True], ids=["without state", "with state"])
def traced(request: pytest.FixtureRequest) -> Traced:
    return Traced(request.param)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Return the programs that XLA compiles within the block."""
    found: list[str] = []

    def heard(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def test_functions_made_anew_of_one_function_share_its_trace_and_its_program(traced: Traced) -> None:
    first = dflow.jit(traced.fn)(X)
    with compilations() as compiled:
        again = [dflow.jit(traced.fn)(X) for _ in range(3)]
    assert (traced.count, compiled) == (1, [])
    for result in again:
        np.testing.assert_array_equal(result, first)


def test_functions_made_within_a_function_share_its_trace(traced: Traced) -> None:
    @dflow.jit
    def outer(x: Any) -> Any:
        return dflow.jit(traced.fn)(x) + dflow.jit(traced.fn)(x + 1)

    outer(X)
    dflow.jit(traced.fn)(X)
    assert traced.count == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda fn: dflow.jit(fn).lower(X).compile(),
        lambda fn: dflow.jit(fn).trace(X),
        lambda fn: dflow.jit(fn).eval_shape(X),
        lambda fn: jax.eval_shape(dflow.jit(fn), X),
        lambda fn: jax.make_jaxpr(dflow.jit(fn))(X),
        lambda fn: jax.eval_shape(fn, X),
        lambda fn: jax.make_jaxpr(fn)(X),
    ],
    ids=["lower", "trace", "eval_shape", "jax.eval_shape", "jax.make_jaxpr", "the function's", "its jaxpr"],
)
def test_whoever_asks_for_a_trace_shares_that_of_the_calls(traced: Traced, ask: Callable[[Any], Any]) -> None:
    ask(traced.fn)
    dflow.jit(traced.fn)(X)
    ask(traced.fn)
    assert traced.count == 1


def test_what_is_compiled_ahead_is_the_program_of_the_calls(traced: Traced) -> None:
    f = dflow.jit(traced.fn)
    compiled = f.lower(X).compile()
    with compilations() as found:
        np.testing.assert_array_equal(f(X), compiled(X))
    assert not found


def test_a_function_of_several_programs_compiles_them_once() -> None:
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((3,), jnp.float32), name="q")

    @dflow.jit
    def step(x: Any) -> Any:
        queue.enqueue(jnp.sin(x))
        return jnp.cos(queue.dequeue())

    compiled = step.lower(X).compile()
    expected = compiled(X)
    with compilations() as found:
        np.testing.assert_array_equal(step(X), expected)
    assert not found


def test_other_options_share_the_trace_and_have_a_program_of_their_own(traced: Traced) -> None:
    given = jnp.ones(3)
    dflow.jit(traced.fn)(given)
    dflow.jit(traced.fn, donate_argnums=0)(given)
    assert traced.count == 1
    assert given.is_deleted()


def test_functions_that_are_equal_share_nothing() -> None:
    class Adds:
        """Instances compare equal whatever their state, like a record that does not list its state as a field."""

        def __init__(self, variable: dflow.Variable) -> None:
            self.variable = variable

        def __call__(self, x: Any) -> Any:
            return self.variable + x

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Adds)

        def __hash__(self) -> int:
            return 7

    one, two = dflow.Variable(1.0, name="one"), dflow.Variable(2.0, name="two")
    f, g = dflow.jit(Adds(one)), dflow.jit(Adds(two))
    assert (float(f(1.0)), float(g(1.0)), float(jax.jit(lambda: 0.0)())) == (2.0, 3.0, 0.0)
    assert (float(jax.grad(f)(1.0)), float(jax.eval_shape(g, 1.0).size)) == (1.0, 1.0)


def test_several_threads_at_a_new_function_trace_it_once(traced: Traced) -> None:
    threads = 8
    start, results = threading.Barrier(threads), []

    def call() -> None:
        start.wait(60)
        results.append(dflow.jit(traced.fn)(X))

    with compilations() as compiled:
        running = [threading.Thread(target=call) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(120)
    assert (len(results), traced.count, len(compiled)) == (threads, 1, 1)


@pytest.mark.parametrize("has_state", [False, True])
def test_deleting_a_function_frees_what_it_held_at_once(has_state: bool) -> None:
    def made() -> tuple[Any, weakref.ref[Any], weakref.ref[Any]]:
        table, variable = jnp.ones(1 << 15), dflow.Variable(0.0, name="v")

        def fn(x: Any) -> Any:
            if has_state:
                variable.assign_add(x)
            return table[0] + x

        return dflow.jit(fn), weakref.ref(table), weakref.ref(variable)

    f, table, variable = made()
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            f(1.0)
        f.lower(1.0)
        assert table() is not None
        del f
        assert table() is None
        assert variable() is None
    finally:
        gc.enable()


def test_a_closed_over_array_is_not_copied() -> None:
    table = jnp.ones(1 << 20)
    f = dflow.jit(lambda i: table[i])
    f(0)
    [held] = f._plans.single._given
    assert held.unsafe_buffer_pointer() == table.unsafe_buffer_pointer()
    assert (held.committed, held.aval) == (table.committed, table.aval)


def test_a_variable_that_is_gone_is_not_looked_for() -> None:
    variables = {"v": dflow.Variable(1.0, name="first")}

    def fn(x: Any) -> Any:
        return variables["v"] + x

    assert dflow.jit(fn).eval_shape(1.0).shape == ()  # a trace, which does not keep its variable alive
    variables["v"] = dflow.Variable(2.0, name="second")
    assert float(dflow.jit(fn)(1.0)) == 3.0
    outer = dflow.jit(lambda x: dflow.jit(fn)(x) * 1)
    assert float(outer(1.0)) == 3.0


class Model:
    """Holds a variable as an attribute."""

    def __init__(self, value: float) -> None:
        self.w = dflow.Variable(value, name="w")


def named(model: Any) -> tuple[Callable[[Any], Any], Callable[[float], None]]:
    """Return a function that closes over a variable deep in an object, and a function that replaces the variable."""
    box = {"models": [model]}

    def inner(x: Any) -> Any:
        return box["models"][0].w * x

    return lambda x: (lambda y: inner(y) * 1)(x) * 1, lambda value: setattr(model, "w", dflow.Variable(value, name="w"))


def held(model: Any) -> tuple[Callable[[Any], Any], Callable[[float], None]]:
    w = model.w

    def rename(value: float) -> None:
        nonlocal w
        w = dflow.Variable(value, name="w")

    return lambda x: w * x, rename


GLOBAL: Any = None


def is_global(model: Any) -> tuple[Callable[[Any], Any], Callable[[float], None]]:
    globals()["GLOBAL"] = model.w

    def rename(value: float) -> None:
        globals()["GLOBAL"] = dflow.Variable(value, name="w")

    return lambda x: dflow.value_and_grad(lambda: GLOBAL * x, [GLOBAL])()[0], rename


@pytest.mark.parametrize("way", [named, held, is_global])
@pytest.mark.parametrize("within", [False, True], ids=["called", "called within another"])
def test_a_function_whose_names_stand_for_other_variables_is_traced_for_these(way: Any, within: bool) -> None:
    fn, rename = way(Model(2.0))
    made = (lambda: dflow.jit(lambda x: dflow.jit(fn)(x) * 1)) if within else (lambda: dflow.jit(fn))
    first = made()
    assert float(first(1.0)) == float(made()(1.0)) == 2.0
    rename(3.0)
    assert float(made()(1.0)) == 3.0
    with pytest.warns(dflow.DuplicateNameWarning, match="variable 'w': expected an unused name"):
        assert float(first(1.0)) == 2.0  # like a result of `dflow.jit` that the caller kept


def test_a_function_that_reaches_too_much_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.tracing.jaxprs.reachable.MOST", 2)
    fn, rename = named(Model(2.0))
    assert float(dflow.jit(fn)(1.0)) == 2.0
    rename(3.0)
    assert float(dflow.jit(fn)(1.0)) == 3.0


def test_partials_and_methods_are_functions_of_their_own() -> None:
    v = dflow.Variable(3.0, name="v")

    def scaled(by: float, x: Any) -> Any:
        return v * by * x

    twice, thrice = functools.partial(scaled, 2.0), functools.partial(scaled, 3.0)
    assert [float(dflow.jit(f)(1.0)) for f in (twice, thrice, twice)] == [6.0, 9.0, 6.0]


def test_what_cannot_be_referred_to_weakly_is_compiled_too() -> None:
    class Slots:
        __slots__ = ()

        def __call__(self, x: Any) -> Any:
            return x + 1

    assert float(dflow.jit(Slots())(1.0)) == 2.0


def returning(variable: dflow.Variable) -> tuple[Callable[[Any], Any], list[Any]]:
    """Return a function that returns a variable from its closure, and the shapes that it was traced for."""
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        seen.append(x.shape)
        return {"variable": variable, "twice": x * 2}

    return fn, seen


ASKS: dict[str, Callable[[Any], Any]] = {
    "called": lambda fn: dflow.jit(fn)(X),
    "within another": lambda fn: dflow.jit(lambda x: {**dflow.jit(fn)(x), "x": x})(X),
    "lowered": lambda fn: dflow.jit(fn).lower(X).compile()(X),
    "eval_shape": lambda fn: dflow.jit(fn).eval_shape(X),
    "options": lambda fn: dflow.jit(fn, donate_argnums=0, keep_unused=True)(jnp.ones(3)),
    "sharded": lambda fn: dflow.jit(fn, out_shardings={"variable": None, "twice": None})(X),
}


@pytest.mark.parametrize("before", [None, jax.eval_shape, jax.make_jaxpr], ids=["", "eval_shape", "jaxpr"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
def test_a_variable_that_is_returned_is_itself_whatever_jax_traced_before(ask: Any, before: Any) -> None:
    v = dflow.Variable(jnp.ones(3), name="v")
    fn, _ = returning(v)
    if before is jax.eval_shape:
        before(fn, X)
    elif before is jax.make_jaxpr:
        before(fn)(X)
    assert ask(fn)["variable"] is v
    v.assign(jnp.zeros(3))
    assert ask(fn)["variable"] is v


def test_a_function_that_jax_traced_before_does_not_run_again_to_return_its_variable() -> None:
    v = dflow.Variable(jnp.ones(3), name="v")
    fn, seen = returning(v)
    jax.eval_shape(fn, X)
    assert dflow.jit(fn)(X)["variable"] is v
    assert len(seen) == 1


@pytest.mark.parametrize("inline", [False, True], ids=["a call", "inlined"])
def test_a_variable_that_a_function_of_jax_returned_is_its_value(inline: bool) -> None:
    v = dflow.Variable(jnp.ones(3), name="v")

    @functools.partial(jax.jit, inline=inline)
    def inner(x: Any) -> Any:
        return v, x

    @dflow.jit
    def outer(x: Any) -> Any:
        return inner(x)

    value, x = outer(X)
    v.assign(jnp.zeros(3))
    assert not dflow.is_variable(value)
    np.testing.assert_array_equal(value, jnp.ones(3))
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize("before", [False, True], ids=["", "traced before"])
def test_a_variable_that_an_inlined_function_of_the_same_line_returned_is_its_value(before: bool) -> None:
    v = dflow.Variable(jnp.ones(3), name="v")
    inner, outer = (lambda: v), (lambda: jax.jit(inner, inline=True)())  # noqa: PLW0108
    if before:
        assert dflow.jit(inner)() is v
    value = dflow.jit(outer)()
    v.assign(jnp.zeros(3))
    assert not dflow.is_variable(value)
    np.testing.assert_array_equal(value, jnp.ones(3))


def test_a_variable_that_is_returned_from_within_a_transform_is_itself() -> None:
    v = dflow.Variable(jnp.ones(3), name="v")
    found: list[Any] = []

    def summed(x: Any) -> Any:
        result = dflow.jit(returning(v)[0])(x)
        found.append(result["variable"])
        return result["twice"].sum()

    np.testing.assert_array_equal(jax.grad(summed)(X), [2, 2, 2])
    np.testing.assert_array_equal(jax.vmap(summed)(X), 2 * X)
    np.testing.assert_array_equal(jax.lax.scan(lambda _, x: (0, summed(x)), 0, X)[1], 2 * X)
    assert all(one is v for one in found)


def test_functions_that_return_a_variable_run_once_and_then_call_one_program() -> None:
    v = dflow.Variable(jnp.ones(3), name="v")
    fn, seen = returning(v)
    f = dflow.jit(fn)
    f(X)
    assert (len(seen), len(f.trace_log())) == (1, 1)
    assert "var_read" not in str(f.trace(X).jaxpr)
    with compilations() as compiled:
        assert f(X)["variable"] is v
    assert (len(seen), compiled) == (1, [])
    assert f(jnp.ones(5))["variable"] is v
    assert (len(seen), len(f.trace_log())) == (2, 2)
    assert dflow.jit(fn)(X)["variable"] is v
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        f()  # type: ignore[call-arg]


def test_a_function_that_returns_variables_runs_once_with_all_that_it_is_given() -> None:
    v, w = dflow.Variable(jnp.ones(3), name="v"), dflow.Variable(jnp.zeros(3), name="w")
    seen: list[str] = []

    @functools.partial(dflow.jit, static_argnames="kind", donate_argnums=1)
    def step(variable: Any, x: Any, *, kind: str, tree: Any) -> Any:
        seen.append(kind)
        variable.assign_add(x)
        total = jax.lax.scan(lambda c, row: (c + row, w.assign_add(row)), x, jnp.ones((2, 3)))[0]
        with dflow.device("cpu:0"):
            inner = jax.jit(lambda y: y * 2)(variable.read())
        return {"twice": [variable, variable], "sum": total, "inner": inner, "w": w, "tree": tree, "read": w.read()}

    for turn in (1, 2):
        got = step(v, jnp.ones(3), kind="a", tree=(2.0, None))
        assert got["twice"] == [v, v]
        assert got["w"] is w
        np.testing.assert_array_equal(got["sum"], jnp.full(3, 3.0))
        np.testing.assert_array_equal(got["inner"], jnp.full(3, 2.0 * (1 + turn)))
        np.testing.assert_array_equal(got["read"], jnp.full(3, 2.0 * turn))
        assert got["tree"] == (2.0, None)
    assert seen == ["a"]
