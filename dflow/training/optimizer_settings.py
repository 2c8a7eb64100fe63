"""The settings of an optax transformation: the numbers that its functions close over, by their names there.

An optax transformation is a pair of functions, and has its settings in their closures only. Functions in a closure,
such as schedules and the parts of a chain, are searched in the same way. A value whose text would differ between
processes, such as an object without fields, is left out: the comparison finds faults, and does not prove equality.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Arrays of more elements than this are shown by a checksum.
LARGEST_SHOWN = 8


def settings_of(transformation: Any) -> tuple[str, ...]:
    """Return a text for each setting, such as `scale_by_adam.b1: 0.9`, in the order of the transformation's parts."""
    return tuple(_found(transformation.update, "update", set()))


def _found(value: Any, name: str, seen: set[int]) -> Iterator[str]:
    shown = _shown(value)
    if shown is not None:
        yield f"{name}: {shown}"
    elif id(value) not in seen:
        seen.add(id(value))
        for inner_name, inner in _parts(value, name):
            yield from _found(inner, inner_name, seen)


def _shown(value: Any) -> str | None:
    """Return the text of a number, a string or an array; None for anything else."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
            return None
        value = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    elif not isinstance(value, np.ndarray | np.generic):
        return None
    array = np.asarray(value)
    if array.size <= LARGEST_SHOWN:
        return np.array2string(array, max_line_width=10**6, separator=", ")
    return f"{array.dtype}{list(array.shape)} of checksum {hashlib.sha256(array.tobytes()).hexdigest()[:8]}"


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, with the name of each."""
    if isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"{name}({number})", one) for number, one in enumerate(value.args))
        yield from ((f"{name}({key})", one) for key, one in value.keywords.items())
    elif isinstance(value, MethodType):
        yield name, value.__func__
        if _is_of_library(type(value.__self__).__module__):
            yield from ((f"{name}.{key.strip('_')}", one) for key, one in vars(value.__self__).items())
    elif isinstance(value, FunctionType):
        yield from _closure(value, name)
    elif isinstance(value, Callable) and hasattr(value, "__wrapped__"):  # type: ignore[arg-type]
        yield name, value.__wrapped__
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        yield from ((f"{name}.{field.name}", getattr(value, field.name, None)) for field in fields)
    elif isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        yield from ((f"{name}.{key}", one) for key, one in zip(names, value, strict=True) if key != "init")
    elif isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        yield from ((f"{name}.{key}", value[key]) for key in sorted(value, key=str))


def _closure(function: FunctionType, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function closes over, its defaults, and the numbers that it names or has in its code."""
    code = function.__code__
    owner = function.__qualname__.split(".<locals>")[0] if "<lambda>" not in function.__qualname__ else name
    if hasattr(function, "__wrapped__"):
        yield owner, function.__wrapped__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{owner}.{variable}", cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    if _is_of_library(function.__module__):  # its code and defaults are the same everywhere
        return
    yield from ((f"{owner}(default {number})", one) for number, one in enumerate(function.__defaults__ or ()))
    yield from ((f"{owner}({key})", one) for key, one in (function.__kwdefaults__ or {}).items())
    constants = [one for one in code.co_consts if isinstance(one, int | float | complex)]
    yield from ((f"{owner} (number {position} in its code)", one) for position, one in enumerate(constants))
    named = [(key, function.__globals__[key]) for key in code.co_names if key in function.__globals__]
    yield from ((f"{owner}.{key}", one) for key, one in named if _shown(one) is not None)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in ("optax", "jax")
