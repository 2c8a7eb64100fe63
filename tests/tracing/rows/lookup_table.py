"""A small table, lookups in it, and the ops that give an array of the table's shape."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import dflow
from dflow.lowering.passes.prune import prune

SHAPE = (13, 2)
TABLE = jnp.arange(26, dtype=jnp.float32).reshape(SHAPE) / 26
SCALE = jnp.array([1.0, -2.0])
IDS = jnp.array([3, 3, 0, -1, 11])


def grown(fn: Any, *args: Any) -> list[str]:
    """Return the ops of a function's graph that give an array of the table's shape."""
    graph = prune(dflow.graph(fn, *args).graph)
    return [node.op.name for node in graph.nodes for v in node.outputs if getattr(v.type, "shape", None) == SHAPE]


def loss_of(table: Any, ids: Any) -> Any:
    return (jnp.sin(jnp.asarray(table)[ids] * 3) ** 2).sum()
