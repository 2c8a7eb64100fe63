"""How the initial value of a variable is made: by one thread, and with the variable's sharding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from dflow.lowering.files.whole_arrays import placed
from dflow.lowering.paging.paged_memory import PagedMemory
from dflow.lowering.values.wide_types import REMEDY, is_cut
from dflow.tracing.context_values import within
from dflow.tracing.errors import DeadlineExceeded, DflowError, VariableError
from dflow.tracing.ir.types import ArrayType, array_type_of

#: A variable of at least this size is computed before the next one is begun.
_LARGE_BYTES = 1 << 20

#: The memory that pages the value that is made now.
_memory: ContextVar[PagedMemory | None] = ContextVar("dflow_paged_memory", default=None)

#: Longest wait for an initial value that another thread makes, in s.
MAKING_S = 600.0


def wait_until_made(key: str, thread: int, ended: threading.Event) -> None:
    """Wait until the initialiser of a variable, which runs on `thread`, has returned or raised.

    Raises VariableError on the initialiser's own thread, DeadlineExceeded after `MAKING_S`.
    """
    if thread == threading.get_ident():
        raise VariableError(
            f"the initialiser of variable {key!r} creates variable {key!r} itself", "give one of them another name"
        )
    if not ended.wait(MAKING_S):
        raise DeadlineExceeded(
            f"the initialiser of variable {key!r}, on another thread, has not ended within {MAKING_S:g} s",
            "does it wait for this thread?",
        )


def first_value(
    key: str, type: ArrayType, make: Callable[[], Any], sharding: Sharding | None, memory: PagedMemory | None = None
) -> jax.Array:
    """Return the value of `make()`, with `sharding` if given, and paged in `memory` if it is large.

    Raises VariableError when it has another type.
    """
    pages = memory if memory is not None and memory.takes(type) else None
    if pages is not None:
        if sharding is not None:
            raise VariableError(
                f"max_memory of variable {key!r}: expected one without a device or a sharding, got {sharding}",
                "leave one of the two out",
            )
        with within(_memory, pages):
            made = make()
    else:
        made = make() if sharding is None else _made_at(sharding, make)
    # A copy, because JAX may alias the memory of a NumPy array, which must not be donated.
    is_own = isinstance(made, Unshared)
    value = made.value if is_own else jnp.array(made, copy=sharding is None and pages is None)
    if array_type_of(value).strong != type:
        remedy = [REMEDY] if is_cut(type.dtype) else []
        raise VariableError(
            f"the initial value of variable {key!r} is {array_type_of(value)}, but it is to hold {type}", *remedy
        )
    if type.size_bytes >= _LARGE_BYTES:
        # Otherwise JAX runs ahead, and the originals of many variables are in memory beside their copies.
        value.block_until_ready()
    if pages is not None:
        return pages.adopted(value) if is_own else pages.copy(value)
    # A Python number becomes a weakly typed array; a variable's array always has the variable's type.
    converted: jax.Array = jax.lax.convert_element_type(value, type.dtype)
    return converted


@dataclass(frozen=True)
class Unshared:
    """A new array; nothing else refers to it."""

    value: jax.Array


def unshared(made: Any) -> Any:
    """Return what an initialiser made, as an array."""
    return made.value if isinstance(made, Unshared) else made


def joined_rows(type: ArrayType, starts: Sequence[int], rows_at: Callable[[Any], Any]) -> Unshared:
    """Return the array of the parts `rows_at(start)`, some rows each, at their starts; a part may repeat rows.

    Beside the array only one part is in memory at a time.
    """
    memory = _memory.get()
    if memory is not None and memory.takes(type):
        return Unshared(memory.filled(type, ((start, np.asarray(rows_at(np.int32(start)))) for start in starts)))
    whole = jnp.zeros(type.shape, type.dtype)
    for start in starts:
        whole = _with_rows(whole, jnp.asarray(rows_at(np.int32(start))), start)
        whole.block_until_ready()
    return Unshared(whole)


@partial(jax_jit, donate_argnums=0)
def _with_rows(whole: jax.Array, rows: jax.Array, start: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, rows.astype(whole.dtype), start, 0)


def _within_mesh(sharding: Sharding) -> AbstractContextManager[Any]:
    """Return the context of an explicit mesh, which ops recorded over its axes need."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
        return nullcontext()
    context: AbstractContextManager[Any] = jax.set_mesh(mesh)
    return context


def _made_at(sharding: Sharding, make: Callable[[], Any]) -> jax.Array:
    """Return the value of `make()` with a sharding; several devices make a shard each, if JAX can trace `make`."""
    made: jax.Array
    if len(sharding.device_set) == 1:
        with jax.default_device(next(iter(sharding.device_set))):
            made = jax.device_put(jnp.array(unshared(make()), copy=True), sharding)
        return made
    try:
        with _within_mesh(sharding):
            made = jax_jit(lambda: jnp.asarray(unshared(make())), out_shardings=sharding)()
    except (DflowError, jax.errors.JAXTypeError):  # `make` reads variables, or cannot be traced
        made = placed(jnp.array(unshared(make()), copy=True), sharding)
    return made
