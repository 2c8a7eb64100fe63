"""Functions with state, which `jax.jit` does not have: their writes, losses, refusals and repeated traces."""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow


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
    """A look at the values ends JAX's first attempt by an exception; later calls must not use its slow path."""
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


def test_a_function_with_state_may_have_refs_inside() -> None:
    v = dflow.Variable(1.0)

    @dflow.jit
    def f(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] += v.read()
        return ref[...]

    assert f(1.0) == 2


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
    with pytest.raises(dflow.DflowError, match=r"has state, and takes no device"):
        f(1.0)
    with pytest.warns(DeprecationWarning, match="backend"):
        f = dflow.jit(lambda x: x + v, backend=jax.default_backend())
    assert f(1.0) == 2
