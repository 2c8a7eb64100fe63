"""A program as calls of `jax.lax` gives what the program gives, at any sizes, and an op that it lacks is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.exporting.converting.numeric_function import numeric_function
from dflow.exporting.converting.program_call import ProgramCall

pytestmark = pytest.mark.once


def attention(x: Any) -> Any:
    """A layer of a transformer, with a causal mask and a normalisation."""
    heads = x.reshape(x.shape[0], x.shape[1], 2, 2)
    scores = jnp.einsum("bthd,bshd->bhts", heads, heads) / jnp.sqrt(2.0)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), heads)
    mixed = mixed.reshape(x.shape) + x
    return (mixed - mixed.mean(-1, keepdims=True)) * jax.lax.rsqrt(mixed.var(-1, keepdims=True) + 1e-6)


def convolutions(x: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    kernel = jnp.arange(24.0).reshape(2, 3, 1, 4) / 24
    found = jax.lax.conv_general_dilated(x[..., None], kernel, (1, 2), "SAME", dimension_numbers=dims)
    return jax.lax.reduce_window(jax.nn.gelu(found), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def loops(x: Any) -> Any:
    last, sums = jax.lax.scan(lambda carry, row: (carry + row, carry.sum()), jnp.zeros(x.shape[1:]), x[:3])
    halved = jax.lax.while_loop(lambda y: jnp.max(y) > 1, lambda y: y / 2, last)
    return halved, sums, jax.lax.cond(sums[1] > 0, lambda: x * 2, lambda: x), jnp.cumsum(x, axis=0)


def choices(x: Any) -> Any:
    order = jnp.argsort(x[:, 0], axis=0)
    best, where = jax.lax.top_k(x, 2)
    return x[order], best, where, jnp.argmax(x, -1), jnp.argmin(x, 0), x.at[0, 1].add(3.0), jnp.any(x > 0, 1), x[::-1]


def numbers(x: Any) -> Any:
    whole = (x * 8).astype(jnp.int32)
    return x @ x.T, whole // 3, whole % 3, jnp.round(x), jax.scipy.special.erf(x), jnp.clip(x, -1, 1), jnp.sign(x) ** 3


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (attention, "b, t, 4"),
        (convolutions, "b, 6, 8"),
        (loops, "4, 3"),
        (choices, "b, 4"),
        (numbers, "b, 4"),
        (lambda x: jnp.concatenate([x, x[:, ::2]], 1).reshape(-1), "b, n"),
        (lambda x: x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16), "b, 4"),
    ],
    ids=["attention", "convolutions", "loops", "choices", "numbers", "shapes", "halves"],
)
def test_a_program_as_calls_gives_what_it_gives(fn: Callable[..., Any], shape: str, tmp_path: Path) -> None:
    shift = dflow.Variable(jnp.ones(()), name="program_call/shift")
    dflow.export(lambda x: fn(x * shift), dflow.spec(shape, jnp.float32)).save(tmp_path / "m")
    numeric = numeric_function(dflow.load(tmp_path / "m", prefix="loaded/"), None, "it")
    call = ProgramCall(numeric.program)
    for sizes in ({"b": 3, "t": 5, "n": 4}, {"b": 1, "t": 2, "n": 7}):
        arrays = numeric.drawn(np.random.default_rng(0), sizes)
        found = jax.jit(lambda *given: call(*numeric.before, *given)[: len(numeric.outputs)])(*arrays)
        for one, other in zip(found, numeric.results(arrays), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_allclose(np.asarray(one, "f8"), np.asarray(other, "f8"), rtol=1e-5, atol=1e-6)


def test_an_op_that_it_lacks_is_named_with_the_users_line(tmp_path: Path) -> None:
    def solve(x: Any) -> Any:
        return jnp.linalg.inv(x)

    line = solve.__code__.co_firstlineno + 1
    dflow.export(solve, jax.ShapeDtypeStruct((3, 3), jnp.float32), platforms=["cpu"]).save(tmp_path / "m")
    numeric = numeric_function(dflow.load(tmp_path / "m"), None, "it")
    with pytest.raises(dflow.ExportError, match=rf"got custom_call of 'lapack_.*'\n  at .*test_program_call.py:{line}"):
        jax.eval_shape(ProgramCall(numeric.program), *numeric.drawn(np.random.default_rng(0), {}))
