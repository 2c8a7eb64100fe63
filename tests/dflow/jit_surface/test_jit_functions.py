"""Functions under JAX's transforms, with loops and callbacks, with state, and with types of libraries."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.experimental.hijax import HiType, ShapedArray, register_hitype

import dflow
from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


def pair(x: Any, y: Any) -> Any:
    return {"x": jnp.sin(x) * y, "y": [y**2]}


def of_own_derivative(jit: Any) -> Any:
    @jax.custom_jvp
    def own(x: Any) -> Any:
        return jnp.sin(x)

    @own.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return own(*primals), 10.0 * tangents[0]

    f = jit(own)
    return f(1.0), jax.grad(f)(1.0), jit(jax.grad(own))(1.0), jax.vmap(jax.grad(f))(jnp.ones(2))


def of_own_vjp(jit: Any) -> Any:
    @functools.partial(jax.custom_vjp, nondiff_argnums=0)
    def own(n: int, x: Any) -> Any:
        return x * n

    own.defvjp(lambda n, x: (x * n, x), lambda n, x, g: (g * 100.0 + x,))
    f = jit(lambda x: own(3, x))
    return f(1.0), jax.grad(f)(1.0), jit(jax.grad(lambda x: own(2, x)))(1.0), jax.jit(jax.grad(jit(f)))(2.0)


def vjp_again(jit: Any) -> Any:
    values, pull = jax.vjp(jit(pair), 1.0, 2.0)
    return values, pull({"x": 1.0, "y": [2.0]}), pull({"x": 0.0, "y": [1.0]})


def traces_under_grad(jit: Any) -> Any:
    """Number of runs of the function under transforms that are called twice."""
    runs: list[int] = []
    f = jit(lambda x: (runs.append(1), x * x)[1])
    seen = []
    for call in (jax.grad(f), jax.grad(f), jax.vmap(lambda x: f(x[0])), jit(jax.grad(f))):
        try:
            call(2.0)
        except ValueError:
            call(jnp.ones((2, 1)))
        seen.append(len(runs))
    return seen


def axis_names(jit: Any) -> Any:
    f = jit(lambda x: x - jax.lax.pmean(x, "i") + jax.lax.axis_index("i"))
    return jax.vmap(f, axis_name="i")(jnp.arange(4.0)), jax.vmap(f, axis_name="i")(jnp.arange(3.0))


def jvp_of_a_closure(jit: Any) -> Any:
    """A function whose closure holds a differentiated value, called twice."""

    def outer(x: Any) -> Any:
        inner = jit(lambda y: y * x)
        return inner(4.0) + inner(5.0)

    return jax.jvp(outer, (5.0,), (1.0,)), jax.grad(outer)(5.0), jax.vmap(outer)(jnp.arange(3.0))


def saved(jit: Any) -> Any:
    f = jax.checkpoint(jit(lambda x: jnp.sin(jnp.sin(x))), policy=jax.checkpoint_policies.dots_saveable)
    return jax.grad(f)(1.0), jit(jax.grad(f))(1.0), jax.grad(jit(f))(1.0)


TRANSFORMS: dict[str, Program] = {
    "jvp of a closure": jvp_of_a_closure,
    "vjp": vjp_again,
    "vmap with an axis name": axis_names,
    "how often it is traced": traces_under_grad,
    "checkpoint with a policy": saved,
    "custom_jvp": of_own_derivative,
    "custom_vjp": of_own_vjp,
    "a pullback as a result": lambda jit: jit(lambda x: jax.vjp(jnp.sin, x)[1])(0.5)(1.0),
}

#: A plain `jax.grad` as the outermost transform runs checkpointed parts itself, so they cannot hold state;
#: `dflow.grad`, or `dflow.jit` around it, lets them.
TRANSFORMS_WITHOUT_STATE = ("checkpoint with a policy",)

test_transforms_are_the_same_as_under_jax_jit = same_as_jax_jit(TRANSFORMS, only_without_state=TRANSFORMS_WITHOUT_STATE)

FLOAT = jax.ShapeDtypeStruct((), jnp.float32)


def printed(jit: Any, fn: Any, *args: Any) -> Any:
    told: list[str] = []
    results = jit(functools.partial(fn, lambda *values: told.append(" ".join(map(str, values)))))(*args)
    jax.effects_barrier()
    return results, told


def ordered(jit: Any) -> Any:
    def fn(tell: Any, x: Any) -> Any:
        for number in range(3):
            io_callback(lambda v, number=number: (tell(number, v), v)[1], FLOAT, x + number, ordered=True)
        return x * 2

    return printed(jit, fn, 1.0)


def ordered_in_a_loop(jit: Any) -> Any:
    def fn(tell: Any, x: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            io_callback(lambda v: tell(v), None, i, ordered=True)
            return c + 1

        return jax.lax.fori_loop(0, 4, body, x)

    return printed(jit, fn, 1.0)


def values_from_outside(jit: Any) -> Any:
    """Each call runs the callback again, the second call too."""
    calls: list[int] = []

    def ask() -> Any:
        calls.append(1)
        return np.float32(len(calls))

    f = jit(lambda x: x + io_callback(ask, FLOAT))
    return f(1.0), f(1.0), len(calls)


def checked_outside(jit: Any) -> Any:
    def fn(x: Any) -> Any:
        checkify.check(x > 0, "x must be positive")
        return x * 2

    outcomes = []
    for x in (1.0, -1.0):
        error, value = checkify.checkify(jit(fn))(x)
        outcomes.append((error.get(), value))
    return outcomes


def an_unchecked_check(jit: Any) -> Any:
    return jit(lambda x: (checkify.check(x > 0, "x"), x)[1])(1.0)


def a_ref_outside(jit: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(3))

    @jit
    def step(x: Any) -> Any:
        ref[...] += x
        return ref[0]

    return step(1.0), step(2.0), ref[...]


def a_ref_inside(jit: Any) -> Any:
    @jit
    def fn(x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(2))
        jax.lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(0, ref[0] + x), None)
        return jax.freeze(ref)

    return fn(2.0)


CONTROL_FLOW: dict[str, Program] = {
    "io_callback": values_from_outside,
    "io_callback, ordered in a loop": ordered_in_a_loop,
    "checkify of a jitted function": checked_outside,
    "a check that nobody asks for": an_unchecked_check,
    "a ref that is closed over": a_ref_outside,
    "a ref inside": a_ref_inside,
}


#: JAX's loops and checkify, outside of any function, compile their function themselves. A `jax.Ref` and a variable
#: cannot be used in one function, which a call reports.
CONTROL_FLOW_WITHOUT_STATE = (
    "checkify of a jitted function",
    "a ref that is closed over",
)

test_loops_and_branches_are_the_same_as_under_jax_jit = same_as_jax_jit(
    CONTROL_FLOW, only_without_state=CONTROL_FLOW_WITHOUT_STATE
)


def test_shardings_of_a_function_with_state() -> None:
    v = dflow.Variable(2.0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    f = dflow.jit(lambda x: x + v, in_shardings=sharding, out_shardings=sharding)
    for x in (jnp.ones(4), np.ones(4, np.float32)):
        np.testing.assert_array_equal(f(x), np.full(4, 3.0))
    assert len(f.trace_log()) == 1


def test_a_device_scope_is_seen_after_a_trace_by_hand() -> None:
    def far(x: Any) -> Any:
        with dflow.device("ps:7"):
            return x + 1

    f = dflow.jit(far)
    f.eval_shape(1.0)
    with pytest.raises(dflow.DeviceError, match="no task offers it"):
        f(1.0)


def test_positions_of_a_method_count_self() -> None:
    class Repeater:
        @functools.partial(dflow.jit, static_argnums=1, donate_argnums=(2,))
        def repeat(self, times: int, x: Any) -> Any:
            return x * times

    x = jnp.ones(2)
    assert Repeater().repeat(3, x).shape == (2,)
    assert x.is_deleted()


def test_a_stateful_function_under_transforms_that_run_at_once() -> None:
    v = dflow.Variable(3.0)
    f = dflow.jit(lambda x: v * x**2)
    for _ in range(2):
        assert float(jax.grad(f)(2.0)) == 12.0
        np.testing.assert_array_equal(jax.vmap(f)(jnp.arange(3.0)), [0, 3, 12])
        np.testing.assert_array_equal(jax.vmap(jax.grad(f))(jnp.arange(3.0)), [0, 6, 12])
    v.assign(1.0)
    assert float(jax.grad(f)(2.0)) == 4.0


def test_a_program_may_put_dflow_jit_in_the_place_of_jax_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "jit", dflow.jit)
    table = dflow.Variable(jnp.zeros((4, 2)))

    @jax.jit
    def step(rows: jax.Array) -> jax.Array:
        table.scatter_add(rows, jnp.ones((2, 2)))
        return jax.jit(jnp.sum)(table[rows])

    assert step(jnp.array([0, 1])) == 4
    assert jax.grad(jax.jit(lambda x: x**2 + table.read().sum()))(2.0) == 4


def test_a_function_with_state_takes_options_for_the_compiler() -> None:
    v = dflow.Variable(1.0)
    assert dflow.jit(lambda x: x + v, compiler_options={"xla_embed_ir_in_executable": True})(1.0) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        dflow.jit(lambda x: x + v, compiler_options={"no_such_option": 1})(1.0)
    lowered = dflow.jit(lambda x: x + v).lower(1.0)
    assert lowered.compile(compiler_options={"xla_embed_ir_in_executable": True})(1.0) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        lowered.compile({"no_such_option": 1})


def test_a_function_with_state_refuses_what_only_jax_compiles() -> None:
    v = dflow.Variable(1.0)
    with pytest.warns(DeprecationWarning, match="device"):
        f = dflow.jit(lambda x: x + v, device=jax.devices()[0])
    with pytest.raises(dflow.DflowError, match=r"<lambda>.* has state, and takes no device"):
        f(1.0)
    with pytest.warns(DeprecationWarning, match="backend"):
        f = dflow.jit(lambda x: x + v, backend=jax.default_backend())
    assert f(1.0) == 2


@dataclass(frozen=True)
class Wrapped:
    """A value of a type that a library registered with JAX."""

    value: Any


@dataclass(frozen=True)
class WrappedType(HiType):
    def lo_ty(self) -> list[Any]:
        return [ShapedArray((), np.dtype("float32"))]

    def lower_val(self, wrapped: Wrapped) -> list[Any]:
        return [wrapped.value]

    def raise_val(self, value: Any) -> Wrapped:
        return Wrapped(value)

    def __repr__(self) -> str:
        return "wrapped"


register_hitype(Wrapped, lambda wrapped: WrappedType())
WRAPPED = Wrapped(np.float32(2))
TABLE = jnp.ones((128, 256))


def adding_to(ref: Any, jit: Any) -> Any:
    """Value of a `jax.Ref` in the function's closure after each of two calls."""

    @jit
    def add(x: Any) -> Any:
        ref[...] += x * TABLE[0, 0]
        return ref[...].sum()

    return add(1.0), add(2.0), ref[...]


def adding_to_argument(jit: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(3))

    @jit
    def add(ref: Any, x: Any) -> Any:
        ref[...] += x * TABLE[0, 0]
        return ref[...].sum()

    return add(ref, 1.0), add(ref, 2.0), ref[...]


TYPES: dict[str, Program] = {
    "a large ref closed over": lambda jit: adding_to(jax.new_ref(jnp.zeros((128, 256))), jit),
    "a ref as an argument": adding_to_argument,
    "a library's type": lambda jit: jit(lambda w, x: (w, x + TABLE[0, 0]))(WRAPPED, 1.0)[0].value,
    "a large array": lambda jit: jit(lambda x: x + TABLE[0, 0], compiler_options={}, keep_unused=True)(1.0),
}

TYPES_WITHOUT_STATE = tuple(name for name in TYPES if name != "a large array")

test_types_are_the_same_as_under_jax_jit = same_as_jax_jit(TYPES, only_without_state=TYPES_WITHOUT_STATE)


def test_a_function_with_state_refuses_values_that_are_no_arrays() -> None:
    v = dflow.Variable(1.0)
    ref = jax.new_ref(jnp.zeros(3))
    with pytest.raises(dflow.DflowError, match=r"has state, and takes, gives or closes over Ref\{.*which is no array"):
        dflow.jit(lambda ref: ref[...] + v)(ref)
    with pytest.raises(dflow.DflowError, match=r"closes over Ref\{"):
        dflow.jit(lambda x: ref[...] + v)(1.0)
    with pytest.raises(dflow.DflowError, match=r"closes over wrapped, which is no array"):
        dflow.jit(lambda x: (WRAPPED, x + v))(1.0)
