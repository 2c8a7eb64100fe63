"""The addition of an optimizer's update to its variable, which rounds as `optax.apply_updates` does.

A bfloat16 parameter and a float32 update are added in float32, and their sum is rounded to bfloat16. An update rounded
before it is added gives another parameter.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from dflow.tracing.primitives.state_primitives import record_update
from dflow.tracing.state.resources import Variable


def add_update(variable: Variable, update: Any) -> None:
    """Add `update`, an array that broadcasts to the variable's shape, as one update, which no other step splits."""
    delta = jnp.broadcast_to(update, variable.shape)
    if jnp.result_type(variable.dtype, update) == variable.dtype:
        variable.assign_add(delta.astype(variable.dtype))
    else:
        record_update(variable, "assign_add_rounded", delta)
