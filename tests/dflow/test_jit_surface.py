"""`dflow.jit` in the place of `jax.jit`: each case is run by both, and must give the same result or the same error."""

from __future__ import annotations

import functools
import re
import warnings
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.hijax import HiType, ShapedArray, register_hitype
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dflow

JITS = {"jax": jax.jit, "dflow": dflow.jit}
Pair = namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclass
class Point:
    x: Any
    y: Any


def numpy_sine(x: Any) -> Any:
    """A function of NumPy's, which jax.jit itself does not survive being given bare."""
    return np.sin(x)


@dataclass(frozen=True)
class Wrapped:
    """A value of a type that a library brought to JAX."""

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
    """What a `jax.Ref` that the function closes over holds after each of two calls."""

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


def both(case: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What the case gives by each, an exception as its type and first line."""
    return outcome(case, JITS["jax"]), outcome(case, JITS["dflow"])


def outcome(case: Callable[[Any], Any], jit: Any) -> Any:
    try:
        return jax.tree.map(np.asarray, case(jit))
    except Exception as error:
        return type(error), re.sub(r" at 0x\w+", "", str(error)).splitlines()[0]


CASES: dict[str, Callable[[Any], Any]] = {
    "positional and keyword": lambda jit: jit(lambda x, *, y: x + y)(1.0, y=2),
    "defaults": lambda jit: jit(lambda x, y=3: x * y)(jnp.ones(2)),
    "varargs": lambda jit: jit(lambda *xs, **ys: sum(xs) + ys["z"])(1, 2, z=3),
    "namedtuple": lambda jit: jit(lambda p: Pair(p.right, p.left))(Pair(1, 2.0)),
    "custom pytree": lambda jit: jax.tree.leaves(jit(lambda p: Point(p.y, [p.x, None]))(Point(1, {"a": 2}))),
    "none and empty": lambda jit: jit(lambda x, y: (x, y, ()))(None, []),
    "weak types": lambda jit: jit(lambda x: x + jnp.ones((), jnp.bfloat16))(1.0).astype(jnp.float32),
    "numpy scalars": lambda jit: jit(lambda x, y: x + y)(np.float32(1), np.int8(2)),
    "booleans": lambda jit: jit(lambda x: ~x)(True),
    "complex": lambda jit: jit(lambda x: x.conj())(1 + 2j),
    "static by number": lambda jit: jit(lambda x, n: x * n, static_argnums=1)(2.0, 3),
    "static by name": lambda jit: jit(lambda x, n: x * n, static_argnames="n")(2.0, n=3),
    "static by name, passed by position": lambda jit: jit(lambda x, n: [x] * n, static_argnames="n")(2.0, 3),
    "static by number, passed by name": lambda jit: jit(lambda x, n: [x] * n, static_argnums=1)(2.0, n=3),
    "static that is negative": lambda jit: jit(lambda x, n: [x] * n, static_argnums=-1)(2.0, 2),
    "static of equal value and other type": lambda jit: (lambda f: (f(1.0, 1), f(1.0, True), f(1.0, 1.0)))(
        jit(lambda x, n: x + isinstance(n, bool), static_argnums=1)
    ),
    "static that is not hashable": lambda jit: jit(lambda x, n: x, static_argnums=1)(2.0, [3]),
    "a static out of range": lambda jit: jit(lambda x: x, static_argnums=3)(2.0),
    "not a JAX type": lambda jit: jit(lambda x: x)("text"),
    "an object": lambda jit: jit(lambda x: x)(object()),
    "a result that is no array": lambda jit: jit(lambda x: "text")(1.0),
    "too few arguments": lambda jit: jit(lambda x, y: x)(1.0),
    "a bool of a tracer": lambda jit: jit(lambda x: 1 if x > 0 else 2)(1.0),
    "numpy of a tracer": lambda jit: jit(numpy_sine)(1.0),
    "an index of a tracer": lambda jit: jit(lambda i: [1, 2][i])(1),
    "a user's error": lambda jit: jit(lambda x: {}["missing"])(1.0),
    "shape mismatch": lambda jit: jit(lambda x, y: x @ y)(jnp.ones(3), jnp.ones(4)),
    "no such option": lambda jit: jit(lambda x: x, static_arguments=1),
    "not callable": lambda jit: jit(3),
    "a partial": lambda jit: jit(functools.partial(lambda a, x: a * x, 3))(2.0),
    "a builtin": lambda jit: jit(abs)(jnp.array(-1.0)),
    "a jitted function": lambda jit: jit(jit(lambda x: x + 1))(2.0),
    "decorator with options": lambda jit: functools.partial(jit, static_argnums=0)(lambda n, x: x * n)(2, 3.0),
    "keys": lambda jit: jax.random.key_data(jit(jax.random.split)(jax.random.key(0))),
    "nested": lambda jit: jit(lambda x: jit(lambda y: y * 2)(x) + jax.jit(jnp.sin)(x))(1.0),
    "eval_shape": lambda jit: repr(jit(lambda x: {"a": x @ x.T}).eval_shape(jnp.ones((2, 3)))),
    "jax.eval_shape": lambda jit: repr(jax.eval_shape(jit(lambda x: x[None]), jnp.ones(3))),
    "make_jaxpr": lambda jit: len(jax.make_jaxpr(jit(lambda x: x * 2))(1.0).eqns),
    "lower": lambda jit: "stablehlo.multiply" in jit(lambda x: x * 2.5).lower(1.0).as_text(),
    "lower and compile": lambda jit: jit(lambda x: x * 2.5).lower(1.0).compile()(3.0),
    "trace": lambda jit: len(jit(lambda x: jnp.sin(x) * 2).trace(1.0).jaxpr.eqns),
    "grad": lambda jit: jax.grad(jit(lambda x: (x**3).sum()))(jnp.arange(3.0)),
    "jit of grad of jit": lambda jit: jit(jax.grad(jit(lambda x: jnp.sin(x).sum())))(jnp.arange(3.0)),
    "jvp": lambda jit: jax.jvp(jit(jnp.sin), (1.0,), (2.0,)),
    "vjp": lambda jit: jax.vjp(jit(jnp.sin), 1.0)[1](2.0),
    "linearize": lambda jit: jax.linearize(jit(jnp.sin), 1.0)[1](2.0),
    "hessian": lambda jit: jax.hessian(jit(lambda x: (x**3).sum()))(jnp.arange(2.0)),
    "vmap": lambda jit: jax.vmap(jit(lambda x, y: x @ y), in_axes=(0, None))(jnp.ones((4, 3)), jnp.ones(3)),
    "jit of vmap of jit": lambda jit: jit(jax.vmap(jit(jnp.sin)))(jnp.arange(3.0)),
    "scan": lambda jit: jax.lax.scan(jit(lambda c, x: (c + x, c * x)), 0.0, jnp.arange(4.0)),
    "while_loop": lambda jit: jax.lax.while_loop(jit(lambda x: x < 10), jit(lambda x: x * 2), 1),
    "cond": lambda jit: jit(lambda p, x: jax.lax.cond(p, jit(jnp.sin), jnp.cos, x))(True, 1.0),
    "checkpoint": lambda jit: jax.grad(jax.checkpoint(jit(lambda x: jnp.sin(jnp.sin(x)))))(1.0),
    "custom_jvp": lambda jit: jax.grad(jit(lambda x: jax.nn.relu(x) * 2))(1.0),
    "named scope": lambda jit: jit(jax.named_scope("here")(lambda x: x + 1))(1.0),
    "closed-over array": lambda jit: jit(lambda x: x + jnp.arange(3))(1.0),
    "device": lambda jit: jit(lambda x: x + 1, backend="cpu")(1.0),
    "a ref closed over": lambda jit: adding_to(jax.new_ref(jnp.zeros(3)), jit),
    "a large ref closed over": lambda jit: adding_to(jax.new_ref(jnp.zeros((128, 256))), jit),
    "a ref as an argument": adding_to_argument,
    "a library's type": lambda jit: jit(lambda w, x: (w, x + TABLE[0, 0]))(WRAPPED, 1.0)[0].value,
    "a library's type closed over": lambda jit: jit(lambda x: (WRAPPED, x + 1))(1.0)[0].value,
    "a compiler option that is none, beside a large array": lambda jit: jit(
        lambda x: x + TABLE[0, 0], compiler_options={"no_such_option": 1}
    )(1.0),
    "a large array": lambda jit: jit(lambda x: x + TABLE[0, 0], compiler_options={}, keep_unused=True)(1.0),
    "debug callback": lambda jit: jit(lambda x: (jax.debug.callback(lambda v: None, x), x)[1])(1.0),
    "pure callback": lambda jit: jit(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), "float32"), x))(1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_jax_jit(name: str) -> None:
    by_jax, by_dflow = both(CASES[name])
    assert str(by_dflow) == str(by_jax)


@pytest.mark.parametrize(
    "name", [name for name in CASES if "no such option" not in name and "not callable" not in name]
)
def test_the_same_as_jax_jit_when_called_twice(name: str) -> None:
    """The second call takes another way than the first; both must agree with JAX's."""
    by_jax, by_dflow = both(lambda jit: (CASES[name](jit), CASES[name](jit))[1])
    assert str(by_dflow) == str(by_jax)


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_donated_arguments_are_lost(jit: Any) -> None:
    f = jit(lambda x, y: x + y, donate_argnums=0)
    for _ in range(3):
        x, y = jnp.ones(8), jnp.ones(8)
        f(x, y)
        assert x.is_deleted()
        assert not y.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        f(x, y)


def test_a_donation_that_cannot_be_used_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        dflow.jit(lambda x: x[0], donate_argnums=0)(jnp.ones(8))


def test_donated_arguments_of_a_function_with_state_are_lost() -> None:
    v = dflow.Variable(jnp.zeros(8))

    @functools.partial(dflow.jit, donate_argnames="x")
    def f(x: Any, y: Any) -> Any:
        v.assign_add(y)
        return x + v

    x, y = jnp.ones(8), jnp.ones(8)
    assert f(x, y)[0] == 2
    assert x.is_deleted()
    assert not y.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        f(x, y)


def test_shardings_in_and_out() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    f = dflow.jit(lambda x: x * 2, in_shardings=sharding, out_shardings=sharding)
    assert f(jnp.ones(4)).sharding == sharding


def test_shardings_of_a_function_with_state() -> None:
    v = dflow.Variable(2.0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    f = dflow.jit(lambda x: x + v, in_shardings=sharding, out_shardings=sharding)
    for x in (jnp.ones(4), np.ones(4, np.float32)):
        np.testing.assert_array_equal(f(x), np.full(4, 3.0))
    assert len(f.trace_log()) == 1


def test_x64_is_another_trace() -> None:
    f = dflow.jit(lambda x: x + v.read().astype(x.dtype))
    v = dflow.Variable(1.0)
    assert f(1.0).dtype == jnp.float32
    with jax.enable_x64(True):
        assert f(np.float64(1.0)).dtype == jnp.float64


def test_disable_jit_runs_the_function_itself() -> None:
    seen: list[Any] = []
    v = dflow.Variable(1.0)

    @dflow.jit
    def f(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer):
            seen.append(x)
        v.assign_add(x)
        return v.read()

    with jax.disable_jit():
        assert float(f(2.0)) == 3.0
    assert seen == [2.0]
    assert float(f(2.0)) == 5.0


def test_state_with_static_arguments() -> None:
    v = dflow.Variable(jnp.ones(2))
    f = dflow.jit(lambda n, x: [x + v] * n, static_argnums=0)
    assert len(f(2, 1.0)) == 2
    assert len(f(3, 1.0)) == 3
    with pytest.raises(ValueError, match=r"[Nn]on-hashable static arguments"):
        f([], 1.0)


def test_a_device_scope_is_seen_after_a_trace_by_hand() -> None:
    def far(x: Any) -> Any:
        with dflow.device("ps:7"):
            return x + 1

    f = dflow.jit(far)
    f.eval_shape(1.0)
    with pytest.raises(dflow.DeviceError, match="no task offers it"):
        f(1.0)


def test_an_error_while_tracing_has_no_context_of_ours() -> None:
    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x: x + v + ({}["missing"] if x.ndim else 0))
    f(1.0)
    with pytest.raises(KeyError) as caught:
        f(jnp.ones(2))
    assert caught.value.__context__ is None


def test_threads_lose_no_update_under_a_transform_that_runs_at_once() -> None:
    count = dflow.Variable(0)

    @dflow.jit
    def f(x: Any) -> Any:
        count.assign_add(1)
        return x**2

    jax.grad(f)(1.0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: (jax.grad(f)(1.0), dflow.grad(f)(1.0)), range(20)))
    assert int(count.read()) == 41


def test_positions_of_a_method_count_self() -> None:
    class Repeater:
        @functools.partial(dflow.jit, static_argnums=1, donate_argnums=(2,))
        def repeat(self, times: int, x: Any) -> Any:
            return x * times

    x = jnp.ones(2)
    assert Repeater().repeat(3, x).shape == (2,)
    assert x.is_deleted()


def test_clear_cache_traces_anew() -> None:
    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x: x + v)
    f(1.0)
    f(1.0)
    assert len(f.trace_log()) == 1
    f.clear_cache()
    f(1.0)
    assert len(f.trace_log()) == 2


def test_a_stateful_function_under_transforms_that_run_at_once() -> None:
    v = dflow.Variable(3.0)
    f = dflow.jit(lambda x: v * x**2)
    for _ in range(2):
        assert float(jax.grad(f)(2.0)) == 12.0
        np.testing.assert_array_equal(jax.vmap(f)(jnp.arange(3.0)), [0, 3, 12])
        np.testing.assert_array_equal(jax.vmap(jax.grad(f))(jnp.arange(3.0)), [0, 6, 12])
    v.assign(1.0)
    assert float(jax.grad(f)(2.0)) == 4.0


def test_a_write_under_plain_grad_that_does_not_depend_is_kept() -> None:
    count = dflow.Variable(0)

    @dflow.jit
    def f(x: Any) -> Any:
        count.assign_add(1)
        return x**2

    assert float(jax.grad(f)(3.0)) == 6.0
    assert int(count.read()) == 1


def test_warm_calls_stay_warm_after_a_look() -> None:
    """A look ends JAX's first attempt by an exception; later calls must not fall back to its slow path."""
    calls: list[int] = []
    f = dflow.jit(lambda x: (calls.append(1), x + 1)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            f(1.0)
    assert f._cache_size() == 1
    assert len(calls) == 1


def test_a_program_may_put_dflow_jit_in_the_place_of_jax_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "jit", dflow.jit)
    table = dflow.Variable(jnp.zeros((4, 2)))

    @jax.jit
    def step(rows: jax.Array) -> jax.Array:
        table.scatter_add(rows, jnp.ones((2, 2)))
        return jax.jit(jnp.sum)(table[rows])

    assert step(jnp.array([0, 1])) == 4
    assert jax.grad(jax.jit(lambda x: x**2 + table.read().sum()))(2.0) == 4


def test_a_function_with_state_refuses_values_that_are_no_arrays() -> None:
    v = dflow.Variable(1.0)
    ref = jax.new_ref(jnp.zeros(3))
    with pytest.raises(dflow.DflowError, match=r"has state, and takes, gives or closes over Ref\{.*which is no array"):
        dflow.jit(lambda ref: ref[...] + v)(ref)
    with pytest.raises(dflow.DflowError, match=r"closes over Ref\{"):
        dflow.jit(lambda x: ref[...] + v)(1.0)
    with pytest.raises(dflow.DflowError, match=r"closes over wrapped, which is no array"):
        dflow.jit(lambda x: (WRAPPED, x + v))(1.0)


def test_a_function_with_state_may_have_refs_inside() -> None:
    v = dflow.Variable(1.0)

    @dflow.jit
    def f(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] += v.read()
        return ref[...]

    assert f(1.0) == 2


def test_a_function_with_state_refuses_what_only_jax_compiles() -> None:
    v = dflow.Variable(1.0)
    options = {"compiler_options": {"xla_embed_ir_in_executable": True}}
    with pytest.raises(dflow.DflowError, match=r"has state, and takes no compiler_options"):
        dflow.jit(lambda x: x + v, **options)(1.0)
    with pytest.warns(DeprecationWarning, match="device"):
        f = dflow.jit(lambda x: x + v, device=jax.devices()[0])
    with pytest.raises(dflow.DflowError, match=r"has state, and takes no device"):
        f(1.0)
    with pytest.warns(DeprecationWarning, match="backend"):
        f = dflow.jit(lambda x: x + v, backend=jax.default_backend())
    assert f(1.0) == 2
