"""How the first value of a variable is made: by one thread, and where it is to stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import jit as jax_jit
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from dflow.lowering.held_value import HeldValue
from dflow.tracing.errors import DeadlineExceeded, DflowError, VariableError
from dflow.tracing.types import ArrayType, array_type_of

#: A variable of this size is made before the next one is begun.
_LARGE_BYTES = 1 << 20

#: How long to wait for a value that another thread makes, in s.
MAKING_S = 600.0


class Making:
    """An initialiser that runs, and on which thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.ended = threading.Event()

    def wait(self, key: str) -> None:
        """Wait until it has ended, in whatever way."""
        if self.thread == threading.get_ident():
            raise VariableError(
                f"the initialiser of variable {key!r} creates variable {key!r} itself\n  give one of them another name"
            )
        if not self.ended.wait(MAKING_S):
            raise DeadlineExceeded(
                f"the initialiser of variable {key!r}, on another thread, has not ended within {MAKING_S:g} s\n"
                "  does it wait for this thread?"
            )


def first_value(key: str, type: ArrayType, make: Callable[[], Any], place: Sharding | None) -> HeldValue:
    """What `make` gives, at `place` if that is said. Raises VariableError when it is of another type."""
    # A copy, because JAX may alias the memory of a NumPy array, which must not be donated.
    value = jnp.array(make(), copy=True) if place is None else _made_at(place, make)
    if array_type_of(value).strong != type:
        raise VariableError(
            f"the initial value of variable {key!r} is {array_type_of(value)}, but it is to hold {type}"
        )
    if type.size_bytes >= _LARGE_BYTES:
        # JAX would run ahead, with the originals of many variables in memory beside their copies.
        value.block_until_ready()
    # A Python number gives a weak array; a variable holds one of its type, in a trace and out of it.
    return HeldValue(jax.lax.convert_element_type(value, type.dtype), type)


def _within_mesh(place: Sharding) -> AbstractContextManager[Any]:
    """The context of an explicit mesh, which ops recorded over its axes ask for."""
    mesh = place.mesh if isinstance(place, NamedSharding) else None
    if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
        return nullcontext()
    context: AbstractContextManager[Any] = jax.set_mesh(mesh)
    return context


def _made_at(place: Sharding, make: Callable[[], Any]) -> jax.Array:
    """What `make` gives, at a place; over several devices it is made in its parts, where JAX can trace `make`."""
    made: jax.Array
    if len(place.device_set) == 1:
        with jax.default_device(next(iter(place.device_set))):
            made = jax.device_put(jnp.array(make(), copy=True), place)
        return made
    try:
        with _within_mesh(place):
            made = jax_jit(lambda: jnp.asarray(make()), out_shardings=place)()
    except (DflowError, jax.errors.JAXTypeError):  # it reads variables, or is no traceable function
        made = jax.device_put(jnp.array(make(), copy=True), place)
    return made
