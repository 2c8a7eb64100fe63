"""The losses of `_models` in JAX, by the model's name: functions of the parameters by name, and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._models import HEADS


def dense(parameters: Mapping[str, Any], x: Any, y: Any) -> Any:
    for weight in parameters.values():
        x = x + jax.nn.relu(x @ weight)
    return jnp.mean((x - y) ** 2)


def transformer(parameters: Mapping[str, Any], words: Any) -> Any:
    x = parameters["words"][words[:, :-1]] + parameters["places"]
    for number in sorted({name.partition("/")[0] for name in parameters if "/" in name}):
        block = {name.partition("/")[2]: parameters[name] for name in parameters if name.startswith(f"{number}/")}
        x = x + attention(block, normalized(x, block["scale1"], block["shift1"]))
        hidden = normalized(x, block["scale2"], block["shift2"]) @ block["up"] + block["up_bias"]
        x = x + jax.nn.relu(hidden) @ block["down"] + block["down_bias"]
    guesses = jax.nn.log_softmax(x @ parameters["words"].T)
    return -jnp.mean(jnp.take_along_axis(guesses, words[:, 1:, None], axis=-1))


def attention(block: Mapping[str, Any], x: Any) -> Any:
    """Causal attention of several heads."""
    query, key, value = ((x @ block[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value"))
    return jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape) @ block["out"]


def normalized(x: Any, scale: Any, shift: Any) -> Any:
    return jax.nn.standardize(x, epsilon=1e-5) * scale + shift


LOSSES: dict[str, Callable[..., Any]] = {"dense": dense, "transformer": transformer}
