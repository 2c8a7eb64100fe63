"""Tracebacks of errors in a user's function have no frames of JAX and dflow."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow


@pytest.fixture
def v() -> dflow.Variable:
    return dflow.Variable(jnp.array([1.0, 2.0, 3.0]), name="leaf")


def frames_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def fails(x: Any) -> Any:
    raise ValueError("from the user")


@pytest.mark.parametrize("way", ["first", "second", "nested", "variable", "gradient", "traced_gradient"])
def test_a_traceback_shows_the_users_frames_alone(v: dflow.Variable, way: str) -> None:
    @dflow.jit
    def step(x: Any, *_: Any) -> Any:
        if x.shape == (3,):
            if way == "traced_gradient":
                return dflow.grad(fails)(x)
            return dflow.jit(fails)(x) if way == "nested" else fails(x)
        return x + v.sum()

    if way == "second":
        step(jnp.ones(2))
    if way == "gradient":
        step = dflow.grad(fails)
    with pytest.raises(ValueError, match="from the user") as caught:
        step(jnp.ones(3), v) if way == "variable" else step(jnp.ones(3))
    _test, *inner = frames_of(caught.value)
    assert inner == (["fails"] if way == "gradient" else ["step", "fails"])
    notes = getattr(caught.value, "__notes__", [])
    assert sum("removed its internal frames" in note for note in notes) == 1


def test_a_traceback_shows_all_frames_when_jax_is_told_so(v: dflow.Variable) -> None:
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(ValueError, match="from the user") as caught:
            dflow.jit(fails)(jnp.ones(3))
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert "_first_call" in frames_of(caught.value)


_WAYS: dict[str, Callable[[], Any]] = {
    "lower": lambda: dflow.jit(fails).lower(jnp.ones(3)),
    "trace": lambda: dflow.jit(fails).trace(jnp.ones(3)),
    "eval_shape": lambda: dflow.jit(fails).eval_shape(jnp.ones(3)),
    "value_and_grad": lambda: dflow.value_and_grad(fails)(jnp.ones(3)),
    "jvp": lambda: dflow.jvp(fails, (1.0,), (1.0,)),
    "vjp": lambda: dflow.vjp(fails, 1.0),
    "hvp": lambda: dflow.hvp(fails)(1.0, 1.0),
}


@pytest.mark.parametrize("way", _WAYS)
def test_other_ways_into_a_users_function_show_no_frames_either(way: str) -> None:
    with pytest.raises(ValueError, match="from the user") as caught:
        _WAYS[way]()
    assert frames_of(caught.value)[1:] == ["<lambda>", "fails"]
