"""A step takes as much memory as `jax.jit` with donated state; a traced value that is kept causes a warning."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax._src.interpreters.partial_eval import DynamicJaxprTrace

import dflow
from dflow.tracing.jax_frontend import living_traces
from dflow.tracing.jaxprs.leaks import LeakedTracerWarning, leaks

WIDTH, LAYERS = 64, 4
X = jnp.ones((8, WIDTH))


def loss_of(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return (x**2).mean()


def peak(compiled: Any) -> int:
    """Peak memory of the program, in bytes."""
    sizes = compiled.memory_analysis()
    own = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return int(sizes.argument_size_in_bytes + own + sizes.temp_size_in_bytes)


def test_a_training_step_needs_what_it_needs_with_state_donated_by_hand() -> None:
    initial = [jnp.eye(WIDTH) * (number + 1) for number in range(LAYERS)]
    weights = [dflow.Variable(value, name=f"w{number}") for number, value in enumerate(initial)]
    adam = optax.adam(1e-3)
    optimizer = dflow.Optimizer(adam, weights)

    @dflow.jit
    def ours(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: loss_of(weights, x), weights)()
        optimizer.apply(gradients)
        return value

    def theirs(weights: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(weights, x)
        changes, state = adam.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, value

    by_hand = jax.jit(theirs, donate_argnums=(0, 1)).lower(initial, adam.init(initial), X).compile()
    assert peak(ours.lower(X).compile()) <= 1.02 * peak(by_hand)


@pytest.mark.device
def test_a_step_writes_into_the_buffers_of_its_variables_and_keeps_no_other() -> None:
    shape = (WIDTH, WIDTH + 1)
    w = dflow.Variable(lambda: jnp.ones(shape), name="w")
    step = dflow.jit(lambda x: w.assign_add(jnp.full(shape, x)))
    step(1.0)

    def where() -> int:
        return int(w.home.store.table.buffer(w.key).unsafe_buffer_pointer())  # type: ignore[attr-defined]

    before = where()
    for _ in range(3):
        step(1.0)
    assert where() == before
    assert len([array for array in jax.live_arrays() if array.shape == shape]) == 1


#: Functions of a module and a value, which keep the value in the module.
WAYS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "list": (lambda home, value: home.kept.append(value), "as element 0 of a list"),
    "attribute": (
        lambda home, value: setattr(home.box, "hidden", value),
        "as attribute 'hidden' of a SimpleNamespace",
    ),
    "global": (lambda home, value: setattr(home, "last", value), "as global 'last' of module home"),
    "dict": (lambda home, value: home.kept.append({"h": value}), "under 'h' in a dict"),
    "closure": (lambda home, value: home.kept.append(lambda: value), "by a function that closes over it"),
}


@pytest.fixture
def home() -> Any:
    """A module that the collector sees: those imported earlier are frozen, and each search of them takes a second."""
    module: Any = ModuleType("home")
    module.kept, module.box = [], SimpleNamespace()
    return module


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_keeps_a_value_is_named_at_the_line_that_made_it(home: Any, way: str, has_state: bool) -> None:
    v = dflow.Variable(1.0)
    keep, holder = WAYS[way]

    @dflow.jit
    def f(x: Any) -> Any:
        doubled = x * 2
        keep(home, doubled)
        return doubled.sum() + (v if has_state else 0.0)

    with pytest.warns(LeakedTracerWarning, match=rf"a value of f, f32\[3\], is kept after its trace: {holder}") as seen:
        f(jnp.ones(3))
    [warning] = seen
    assert (warning.filename, warning.lineno) == (__file__, f.fn.__code__.co_firstlineno + 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(jnp.ones(3))


def test_a_value_kept_by_a_function_called_within_is_named_too(home: Any) -> None:
    @dflow.jit
    def inner(x: Any) -> Any:
        home.kept.append(x + 1)
        return x

    with pytest.warns(LeakedTracerWarning, match="a value of inner, "):
        dflow.jit(lambda x: inner(x) * 2)(1.0)


def test_of_many_kept_values_the_first_are_named(home: Any) -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        home.kept += [x + number for number in range(20)]
        return x

    with pytest.warns(LeakedTracerWarning) as seen:
        f(jnp.ones(3))
    assert len({str(one.message) for one in seen}) == 8


def test_what_is_kept_while_tracing_only_is_fine() -> None:
    v = dflow.Variable(jnp.ones(3), name="v")

    @jax.custom_jvp
    def cube(x: Any) -> Any:
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(primals[0]), 3 * primals[0] ** 2 * tangents[0]))

    @dflow.jit
    def f(x: Any) -> Any:
        cache = {"x": x, "again": [x * 2]}
        cycle: list[Any] = [x + 1]
        cycle.append(cycle)
        total, _ = jax.lax.scan(lambda c, row: (c + cube(row), row), jnp.zeros(3), cache["again"][0] + v)
        try:
            jnp.ones(3) + jnp.ones(4)
        except TypeError as error:
            cycle.append(error)
        v.assign_add(total)
        return dflow.value_and_grad(lambda: jnp.vdot(v, total), [v])(), jax.grad(lambda y: cube(y).sum())(total)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(jnp.ones((4, 3)))


@pytest.mark.parametrize("has_state", [False, True])
def test_what_the_rule_of_a_derivative_closes_over_is_part_of_the_program(has_state: bool) -> None:
    v = dflow.Variable(jnp.ones(3), name="v")

    @dflow.jit
    def f(batch: Any) -> Any:
        held = {"a": [batch * 2]}
        fn = jax.custom_vjp(lambda x: (x * held["a"][0]).sum())
        fn.defvjp(lambda x: (fn(x), None), lambda _, g: (g * held["a"][0],))
        if not has_state:
            return jax.lax.scan(lambda carry, _: (carry + fn(batch), None), fn(batch), None, 2)[0]
        value, [gradient] = dflow.value_and_grad(lambda: fn(v.read()), [v])()
        v.assign_sub(gradient)
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(jnp.ones(3))


def test_what_is_in_the_making_is_not_kept() -> None:
    """Tuples that only a running function holds, such as residuals or a refused result, are not reported."""
    scaled = jax.custom_vjp(lambda x: x * 2)
    scaled.defvjp(dflow.jit(lambda x: (x * 2, x)), dflow.jit(lambda x, g: (g * x,)))
    refused = dflow.jit(lambda x: (x * 2, (x, "text")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(jax.grad(scaled)(3.0)) == 3.0
        with pytest.raises(TypeError, match="not a valid JAX type"):
            refused(1.0)


def test_a_trace_that_is_garbage_leaks_nothing_though_others_do() -> None:
    class Trace:
        """A stand-in for a trace that is garbage in a reference cycle."""

    kept: list[Any] = []
    jax.jit(lambda x: kept.append((x * 2, None)))(1.0)
    gc.collect()
    gc.disable()
    try:
        trace: Any = Trace()
        trace.itself = trace
        garbage = weakref.ref(trace)
        del trace
        assert garbage() is not None
        assert leaks(garbage) == []
    finally:
        gc.enable()
    assert kept


def test_a_trace_that_another_thread_is_making_is_no_leak() -> None:
    half_made: Any = object.__new__(DynamicJaxprTrace)
    assert half_made in [trace() for trace in living_traces()]
    assert float(dflow.jit(lambda x: x + 1)(1.0)) == 2


def test_an_error_that_is_kept_keeps_the_values_of_its_trace_and_is_no_leak_later() -> None:
    """A notebook keeps the last error, with the frames of the trace. To search for their holders takes seconds."""
    may_fail = True

    @dflow.jit
    def step(x: Any) -> Any:
        holder = {"h": x * 2}
        if may_fail:
            raise ValueError("refused")
        return holder["h"]

    with pytest.raises(ValueError, match="refused") as kept:
        step(1.0)
    may_fail = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(step(1.0)) == 2
    assert kept.value.__traceback__ is not None
