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

_NUMBERS = (bool, int, float, complex, np.ndarray, np.generic)


class _Here(threading.local):
    is_eager = False


_here = _Here()


@contextmanager
def eager() -> Iterator[None]:
    """In this thread, run functions of `dflow.jit` op by op; each op takes effect immediately.

    Values, final state and errors are those of the compiled run, up to rounding; it is much slower. Gradients are
    still computed by tracing: inside a function that is differentiated, values are abstract.
    """
    was, _here.is_eager = _here.is_eager, True
    try:
        with jax.disable_jit():
            yield
    finally:
        _here.is_eager = was


def call_eagerly(fn: Callable[..., Any], static: StaticArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `fn` on real values. Numbers and NumPy arrays become JAX arrays, as in a trace, except in static arguments.

    Under `jax.disable_jit` alone the arguments are not converted, as with JAX's own jit.
    """
    if not _here.is_eager:
        return fn(*args, **kwargs)
    is_static = static.test_of(args)
    arrays = tuple(arg if is_static(place) else _as_arrays(arg) for place, arg in enumerate(args))
    named = {name: value if is_static(name) else _as_arrays(value) for name, value in kwargs.items()}
    return _as_arrays(fn(*arrays, **named))


def _as_arrays(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf, tree)
