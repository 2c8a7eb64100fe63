"""States of metrics that are no means, such as the AUC: what a step returns of its batch.

A state is a JAX pytree with the methods `merge(other)`, which returns the state of both batches, and `compute()`, such
as those of `dflow.metrics`, clu and metrax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

#: Largest integer that JAX keeps, as which it takes a NumPy array of 64 bits.
_LARGEST = np.iinfo(np.int32).max


def is_state(value: Any) -> bool:
    """Return whether a value is the state of a metric."""
    return callable(getattr(type(value), "merge", None)) and callable(getattr(type(value), "compute", None))


def named_results(outcome: Any) -> Mapping[Any, Any]:
    """Return the results of a step by name: a single one is `loss`, and the state of a metric names its values."""
    if isinstance(outcome, Mapping):
        return outcome
    return {"" if is_state(outcome) else "loss": outcome}


def states(outcome: Any) -> dict[str, Any]:
    """Return the states of metrics in a step's result, by name."""
    return {str(name): value for name, value in named_results(outcome).items() if is_state(value)}


def on_host(state: Any) -> Any:
    """Return a state with NumPy arrays of 64 bits, whose sums are exact; waits until it is computed."""
    return jax.tree_util.tree_map(_wide, state)


def computed(name: str, state: Any) -> dict[str, float]:
    """Return the values of a state on the host: one is called `name`, several `name/key` or `name/index`.

    Without a name, one value is `loss`. The values of a metric of nothing, such as 0 / 0, are NaN.
    """
    with np.errstate(all="ignore"):
        found = jax.tree_util.tree_map(_for_jax, state).compute()
    return {key or "loss": value for key, value in _named(name, found)}


def _wide(leaf: Any) -> Any:
    array = np.asarray(leaf)
    return array.astype(np.int64 if array.dtype.kind in "iub" else np.float64)


def _for_jax(leaf: Any) -> Any:
    """Return an array that JAX, which keeps 32 bits, does not wrap around."""
    array = np.asarray(leaf)
    is_large = array.dtype.kind in "iu" and np.abs(array).max(initial=0) > _LARGEST
    return array.astype(np.float64) if is_large else array


def _named(name: str, found: Any) -> Iterator[tuple[str, float]]:
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _named(f"{name}/{key}" if name else str(key), value)
        return
    values = np.asarray(found, np.float64)
    for index in np.ndindex(values.shape):
        yield "/".join(filter(None, [name, *map(str, index)])), float(values[index])
