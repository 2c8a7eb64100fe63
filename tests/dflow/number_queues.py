"""Queues of numbers, filled and emptied."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow

F32 = jax.ShapeDtypeStruct((), jnp.float32)
I32 = jax.ShapeDtypeStruct((), jnp.int32)
WAIT_S = 60.0


def numbers(*values: float, capacity: int = 8, name: str = "q") -> dflow.FIFOQueue:
    """A queue of numbers that contains some."""
    queue = dflow.FIFOQueue(capacity, F32, name=name)
    for value in values:
        queue.enqueue(value)
    return queue


def drained(queue: Any) -> list[Any]:
    """Dequeue all elements, in order."""
    return [np.asarray(queue.dequeue(timeout_s=0)).tolist() for _ in range(int(queue.size()))]
