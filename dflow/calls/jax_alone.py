"""Features that only JAX can run: functions with state refuse them; functions without state leave them to JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import jit as jax_jit

from dflow.tracing.errors import DflowError
from dflow.tracing.jax_frontend import strange_types

_VALUES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def takes_constants(options: Mapping[str, Any], jaxpr: Any, consts: Sequence[Any]) -> bool:
    """Whether closed-over arrays may become inputs without a visible difference.

    An input has a device and a constant has none; and only JAX handles `jax.Ref`s and the options `backend` and
    `device`.
    """
    placed = any(getattr(const, "committed", False) for const in consts) and jax.device_count() > 1
    return not (placed or _given(options) or strange_types(jaxpr))


def refuse_state(name: str, options: Mapping[str, Any], jaxpr: Any) -> None:
    """Raise DflowError if the function `name`, which has state, uses a feature that only JAX can run."""
    if given := _given(options):
        raise DflowError(
            f"{name} has state, and takes no {' and no '.join(given)}",
            "leave that out: jax.default_device holds for every call within",
        )
    if types := strange_types(jaxpr):
        raise DflowError(
            f"{name} has state, and takes, gives or closes over {types[0]}, which is no array",
            "pass the array it holds (of a jax.Ref, ref[...]), or keep that in a dflow.Variable",
        )


def _given(options: Mapping[str, Any]) -> list[str]:
    """Return which of the options `backend` and `device` are set to something else than the default backend."""
    given = {name: options.get(name) for name in ("backend", "device")}
    return [name for name, value in given.items() if value not in (None, jax.default_backend())]


def refuse_types_alone(fn: Callable[..., Any], options: Mapping[str, Any], args: Any, kwargs: Any, leaves: Any) -> None:
    """Have JAX raise its own error for arguments that have a type but no value, such as a ShapeDtypeStruct."""
    if not all(isinstance(leaf, _VALUES) for leaf in leaves):
        static = {name: given for name, given in options.items() if name.startswith("static")}
        jax_jit(functools.wraps(fn)(lambda *args, **kwargs: 0), keep_unused=True, **static)(*args, **kwargs)
