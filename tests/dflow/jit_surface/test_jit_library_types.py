"""Types without arrays, a `jax.Ref`, types of libraries, and large arrays behave as under JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.hijax import HiType, ShapedArray, register_hitype

import dflow
from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


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


PROGRAMS: dict[str, Program] = {
    "a large ref closed over": lambda jit: adding_to(jax.new_ref(jnp.zeros((128, 256))), jit),
    "a ref as an argument": adding_to_argument,
    "a library's type": lambda jit: jit(lambda w, x: (w, x + TABLE[0, 0]))(WRAPPED, 1.0)[0].value,
    "a large array": lambda jit: jit(lambda x: x + TABLE[0, 0], compiler_options={}, keep_unused=True)(1.0),
}

WITHOUT_STATE = tuple(name for name in PROGRAMS if name != "a large array")

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)


def test_a_function_with_state_refuses_values_that_are_no_arrays() -> None:
    v = dflow.Variable(1.0)
    ref = jax.new_ref(jnp.zeros(3))
    with pytest.raises(dflow.DflowError, match=r"has state, and takes, gives or closes over Ref\{.*which is no array"):
        dflow.jit(lambda ref: ref[...] + v)(ref)
    with pytest.raises(dflow.DflowError, match=r"closes over Ref\{"):
        dflow.jit(lambda x: ref[...] + v)(1.0)
    with pytest.raises(dflow.DflowError, match=r"closes over wrapped, which is no array"):
        dflow.jit(lambda x: (WRAPPED, x + v))(1.0)
