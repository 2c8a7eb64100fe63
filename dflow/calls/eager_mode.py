"""`with dflow.eager():` runs functions of `dflow.jit` op by op on real values, for print and pdb.

It enables JAX's own `jax.disable_jit`, so that loops and branches of `jax.lax` run as Python too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow.tracing.derivatives.eager_control_flow  # noqa: F401  (registers with JAX how to run dflow's ops eagerly)
from dflow.calls.static_arguments import StaticArguments
from dflow.tracing.jax_frontend import is_resource

_NUMBERS = (bool, int, float, complex, np.ndarray, np.generic)


#: Has `is_eager` in a thread that has used `eager`.
_here = threading.local()


@contextmanager
def eager() -> Iterator[None]:
    """In this thread, run functions of `dflow.jit` op by op; each op takes effect immediately.

    Values, final state and errors are those of the compiled run, up to rounding; it is much slower. Gradients are
    still computed by tracing: inside a function that is differentiated, values are abstract.
    """
    was, _here.is_eager = getattr(_here, "is_eager", False), True
    try:
        with jax.disable_jit():
            yield
    finally:
        _here.is_eager = was


def call_eagerly(fn: Callable[..., Any], static: StaticArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `fn` on real values. Under `jax.disable_jit` alone these are not made arrays, as with JAX's own jit."""
    return call_on_arrays(fn, static, args, kwargs) if getattr(_here, "is_eager", False) else fn(*args, **kwargs)


def call_on_arrays(fn: Callable[..., Any], static: StaticArguments, args: Any, kwargs: Any) -> Any:
    """Call `fn` with JAX's arrays in place of numbers, also in the result, as JAX's functions do in a trace."""
    arrays, named = static.mapped(_as_arrays, args, kwargs)
    return _as_arrays(fn(*arrays, **named))


def _as_arrays(tree: Any) -> Any:
    return jax.tree_util.tree_map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf, tree, is_leaf=is_resource
    )
