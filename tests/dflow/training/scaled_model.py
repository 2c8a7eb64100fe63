"""A model whose values tell which one was saved, and the comparison of two pytrees of variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow


def scaled_model(scale: float) -> Any:
    return dflow.variables(
        {"dense": {"w": jnp.full((2, 3), float(scale)), "b": jnp.zeros(3)}, "step": jnp.int32(scale)}
    )


def same(tree: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, dflow.read(tree), dflow.read(other))
