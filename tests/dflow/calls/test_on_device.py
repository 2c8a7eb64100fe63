"""Tests for an accelerator, run on JAX's default platform here; `make gpu-check` runs them on a GPU.

Results are compared with NumPy's within the rounding errors of other devices.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl

import dflow

pytestmark = pytest.mark.device

DEADLINE_S = 60.0


def near(found: Any, wanted: Any, dtype: Any = np.float32) -> None:
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-4
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(wanted, np.float64), rtol=tolerance, atol=tolerance
    )


def buffer_of(variable: dflow.Variable) -> int:
    """Address of the value in the device's memory."""
    return int(variable.home.store.table.buffer(variable.key).unsafe_buffer_pointer())  # type: ignore[attr-defined]


@pytest.fixture
def large() -> dflow.Variable:
    return dflow.Variable(jnp.zeros((256, 128)), name="large")


def test_values_and_results_lie_on_the_default_device(large: dflow.Variable) -> None:
    @dflow.jit
    def step(x: Any) -> Any:
        large.assign_add(x)
        return large.sum()

    result = step(np.ones((256, 128), np.float32))
    assert {*result.devices(), *large.read().devices()} == {jax.devices()[0]}
    near(result, 256 * 128)


def test_an_update_is_in_place_in_a_step_and_out_of_it(large: dflow.Variable) -> None:
    step, ones = dflow.jit(large.assign_add), jnp.ones((256, 128))
    step(ones)
    lies = buffer_of(large)
    for _ in range(3):
        step(ones)
    large.assign_add(ones)
    large.scatter_add(jnp.array([0, 3]), jnp.ones((2, 128)))
    assert buffer_of(large) == lies
    near(large.read()[0], np.full(128, 6.0))
    compiled = step.lower(ones).compile().memory_analysis()
    assert compiled.alias_size_in_bytes >= large.read().nbytes


def test_what_was_read_stays_as_it_was(large: dflow.Variable) -> None:
    @dflow.jit
    def step() -> Any:
        large.assign_add(jnp.ones((256, 128)))
        return large.read()

    first = step()
    before = large.read()
    step()
    near(first, np.ones((256, 128)))
    near(before, np.ones((256, 128)))


def test_a_donated_argument_is_given_up_and_its_memory_used_again() -> None:
    total = dflow.Variable(jnp.zeros(1024), name="total")

    def step(x: Any) -> Any:
        total.assign_add(x)
        return x * 2.0

    given = jnp.arange(1024.0)
    result = dflow.jit(step, donate_argnums=0)(given)
    assert given.is_deleted()
    near(result, np.arange(1024) * 2.0)
    near(total.read(), np.arange(1024))


def test_steps_leave_no_more_arrays_behind_than_the_first(large: dflow.Variable) -> None:
    @dflow.jit
    def step(x: Any) -> Any:
        large.assign_sub(0.1 * x)
        return (large * x).sum()

    x = jnp.ones((256, 128))
    step(x)
    held = sum(array.nbytes for array in jax.live_arrays())
    for _ in range(10):
        step(x)
    assert sum(array.nbytes for array in jax.live_arrays()) <= held


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_looked_up_and_updated_as_numpy_does(dtype: Any) -> None:
    random = np.random.default_rng(0)
    start, rows = random.standard_normal((50, 8)), random.standard_normal((6, 8))
    indices = np.array([3, 3, 0, 49, 7, 3])
    table = dflow.Variable(jnp.asarray(start, dtype), name="table")

    @dflow.jit
    def step(indices: Any, rows: Any) -> Any:
        before = table[indices]
        table.scatter_add(indices, rows)
        return before

    near(step(indices, jnp.asarray(rows, dtype)), start[indices], dtype)
    wanted = start.copy()
    np.add.at(wanted, indices, rows)
    near(table.read(), wanted, dtype)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_an_optimizers_steps_are_those_of_optax_alone(name: str) -> None:
    rule = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(0.01)}[name]
    start = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4), "b": jnp.zeros(4)}
    x, y = jnp.cos(jnp.arange(80.0)).reshape(10, 8), jnp.sin(jnp.arange(40.0)).reshape(10, 4)

    def loss(params: Any) -> Any:
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    params = dflow.variables(start)
    optimizer = dflow.Optimizer(rule, params)

    @dflow.jit
    def step() -> Any:
        value, gradients = dflow.value_and_grad(lambda: loss(dflow.read(params)), params)()
        optimizer.apply(gradients)
        return value

    @jax.jit
    def plain(params: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params)
        changes, state = rule.update(gradients, state, params)
        return value, optax.apply_updates(params, changes), state

    alone, state = start, rule.init(start)
    for _ in range(5):
        value, alone, state = plain(alone, state)
        near(step(), value)
    for key, variable in params.items():
        near(variable.read(), alone[key])


def test_loops_and_branches_with_state_run() -> None:
    total = dflow.Variable(0.0, name="total")

    @dflow.jit
    def step(xs: Any) -> None:
        def turn(_: Any, x: Any) -> Any:
            jax.lax.cond(x > 0, lambda: total.assign_add(x), lambda: total.assign_sub(1.0))
            return None, None

        jax.lax.scan(turn, None, xs)

    step(jnp.array([1.0, -5.0, 2.5]))
    near(total.read(), 2.5)


def test_a_queue_brings_batches_from_a_thread_to_the_device() -> None:
    batch = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    queue = dflow.FIFOQueue(2, batch, name="batches")
    total = dflow.Variable(jnp.zeros(4), name="sums")

    def batches() -> Iterator[Any]:
        for number in range(6):
            yield np.full((16, 4), number, np.float32)

    def feed() -> None:
        for each in batches():
            queue.enqueue(each)
        queue.close()

    @dflow.jit
    def step() -> None:
        total.assign_add(queue.dequeue().sum(0))

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    for _ in range(6):
        step()
    feeder.join(DEADLINE_S)
    near(total.read(), np.full(4, 16.0 * sum(range(6))))
    with pytest.raises(dflow.QueueClosed):
        step()


def scaled_body(x_ref: Any, y_ref: Any) -> None:
    y_ref[...] = x_ref[...] * 2.0


# JAX 0.11 warns of the compiler that it chooses for GPUs.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_every_implementation_of_a_kernel_agrees_with_the_plain_function() -> None:
    @dflow.kernel
    def scaled(x: Any) -> Any:
        return x * 2.0

    @dflow.kernel(scaled, platform=["cuda", "tpu"])
    def scaled_by_pallas(x: Any) -> Any:
        block = pl.BlockSpec((16, 128), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(scaled_body, shape, grid=(x.shape[0] // 16,), in_specs=[block], out_specs=block)(x)

    x = jnp.arange(32 * 128.0).reshape(32, 128)
    told = str(dflow.check_kernel(scaled, x))
    for platform in ("cuda", "tpu"):
        assert f"{platform} scaled_by_pallas: " in told
    w = dflow.Variable(x, name="w")
    step = dflow.jit(lambda: w.assign(scaled(w)))
    step()
    near(w.read() / 1e3, x * 2.0 / 1e3)
    near(jax.grad(lambda x: scaled(x).sum())(x), np.full((32, 128), 2.0))
