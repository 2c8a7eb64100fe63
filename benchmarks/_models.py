"""Models of many small variables: their initial values, the same in every process, and their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Model:
    """Initial values by name, a batch, and the loss of parameters and a batch."""

    initial: dict[str, np.ndarray]
    batch: tuple[np.ndarray, ...]
    loss: Callable[..., Any]


def dense(layers: int, width: int = 64, batch: int = 32) -> Model:
    """`layers` layers without biases, each a product and a ReLU."""
    draw = np.random.default_rng(0)
    initial = {
        f"w{number:04}": draw.normal(0, (2 / width) ** 0.5, (width, width)).astype(np.float32)
        for number in range(layers)
    }
    x, y = (draw.normal(size=(batch, width)).astype(np.float32) for _ in range(2))

    def loss(parameters: dict[str, Any], x: Any, y: Any) -> Any:
        for weight in parameters.values():
            x = jax.nn.relu(x @ weight)
        return jnp.mean((x - y) ** 2)

    return Model(initial, (x, y), loss)
