"""Functions with state, which `jax.jit` does not have: their writes, losses, refusals and repeated traces."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow


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
