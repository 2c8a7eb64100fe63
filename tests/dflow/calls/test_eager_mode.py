"""`dflow.eager()`: the same function, op by op on real values."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow


def test_values_are_real_and_seen_each_time() -> None:
    w = dflow.Variable(jnp.ones(2))
    seen: list[float] = []

    @dflow.jit
    def step(x: Any) -> Any:
        w.assign_add(jnp.full(2, x))

        def turn(carry: Any, row: Any) -> Any:
            if not isinstance(row, jax.core.Tracer):
                seen.append(float(row))
            return carry + row, carry

        return jax.lax.scan(turn, 0.0, w.read())[0]

    with dflow.eager():
        results = [float(step(1.0)), float(step(2.0))]
    assert (results, seen) == ([4.0, 8.0], [2.0, 2.0, 4.0, 4.0])
    assert len(step.trace_log()) == 0
    assert float(step(0.0)) == 8.0
    assert len(step.trace_log()) == 1


def test_python_may_branch_on_a_value() -> None:
    @dflow.jit
    def half_or_double(x: Any) -> Any:
        return x / 2 if x > 1 else x * 2

    with dflow.eager():
        assert float(half_or_double(3.0)) == 1.5
    with pytest.raises(jax.errors.TracerBoolConversionError, match="traced array"):
        half_or_double(3.0)


@pytest.mark.parametrize("argument", [3, 2.5, np.float32(2), np.arange(3), np.ones(2, np.float16), True])
def test_numbers_and_numpy_arrays_are_the_arrays_they_would_be_compiled(argument: Any) -> None:
    def function(x: Any) -> Any:
        return {"halved": x / 2, "same": x, "number": 3, "row": np.arange(2), "bf16": x * jnp.bfloat16(1)}

    compiled = dflow.jit(function)(argument)
    with dflow.eager():
        result = dflow.jit(function)(argument)
    for name, expected in compiled.items():
        assert isinstance(result[name], jax.Array), name
        assert (result[name].dtype, result[name].shape) == (expected.dtype, expected.shape), name
        np.testing.assert_array_equal(result[name], expected)


def test_static_arguments_stay_what_they_are() -> None:
    kinds: list[type] = []

    def function(x: Any, n: int, *, flag: bool) -> Any:
        kinds.extend([type(n), type(flag)])
        return x * n

    counted = dflow.jit(function, static_argnames=("n", "flag"))
    with dflow.eager():
        assert float(counted(2.0, 3, flag=True)) == 6.0
        assert float(counted(2.0, n=3, flag=True)) == 6.0
        assert float(dflow.jit(function, static_argnums=-1, static_argnames="flag")(2.0, 3, flag=True)) == 6.0
    assert kinds == [int, bool] * 3


def test_a_generator_goes_on_as_it_would_compiled() -> None:
    one, two = dflow.Generator(3), dflow.Generator(3)
    with dflow.eager():
        eagerly = [dflow.jit(lambda: jax.random.bits(one.split()))() for _ in range(2)]
    draw = dflow.jit(lambda: jax.random.bits(two.split()))
    assert [int(bits) for bits in eagerly] == [int(draw()), int(draw())]


def _summed(v: dflow.Variable, c: Any) -> tuple[Any, Any]:
    v.assign_add(c)
    return c * 2, v.read()


NESTED: dict[str, Any] = {
    "a bounded loop": lambda v, x: dflow.while_loop(lambda c: c.sum() < v.read(), lambda c: c + v, x, max_iters=4),
    "a scan backwards in a checkpoint": lambda v, x: jax.checkpoint(
        lambda x: jax.lax.scan(lambda c, y: _summed(v, c + y), x.sum(), x, reverse=True)
    )(x),
    "a loop under vmap": lambda v, x: jax.vmap(
        lambda y: jax.lax.while_loop(lambda c: c < v.read(), lambda c: c + v.read() / 2, y)
    )(x),
}


@pytest.mark.parametrize("fn", NESTED.values(), ids=NESTED)
def test_loops_and_branches_that_jax_traces_first_run_as_compiled(fn: Any) -> None:
    outcomes = []
    for is_eager in (False, True):
        v = dflow.Variable(3.0)
        step = dflow.jit(lambda x, v=v: fn(v, x))
        with dflow.eager() if is_eager else contextlib.nullcontext():
            outcomes.append(jax.tree.map(lambda a: np.asarray(a).tolist(), (step(jnp.arange(4.0)), v.read())))
    assert outcomes[0] == outcomes[1]
