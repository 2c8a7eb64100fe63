"""Small stores, and compiled programs over their variables."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.programs.program import lower_program
from dflow.lowering.state.store import Store
from dflow.tracing.ir.types import ArrayType

F32 = ArrayType(np.dtype("float32"), (3,))
WAIT_S = 60.0
ONES = jnp.ones(3, jnp.float32)


def pointer(array: jax.Array) -> int:
    """Address of the array's elements in memory."""
    return int(array.unsafe_buffer_pointer())


def new_store(**values: Any) -> Store:
    store = Store()
    for key, value in values.items():
        store.create(key, F32, functools.partial(jnp.full, 3, value, jnp.float32))
    return store


ADD = lower_program(lambda w, x: [w + x], [F32, F32], 1).compile()
