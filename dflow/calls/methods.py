"""Compiled functions as methods of objects that are no pytrees."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dflow.tracing.errors import DflowError


class OwnFunction:
    """The compiled function of one object, called with that object first, as Python calls the function of a method."""

    def __init__(self, fn: Callable[..., Any], function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._function = function

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_function":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._function, name)


def weakly(instance: Any, on_death: Callable[[Any], object]) -> weakref.ref[Any]:
    """Return a weak reference to an object with a compiled method. Raises DflowError if its class does not allow it."""
    try:
        return weakref.ref(instance, on_death)
    except TypeError:
        raise DflowError(
            f"a compiled method keeps its traces with its object, but a {type(instance).__name__} takes no weak "
            f"references",
            'add "__weakref__" to its __slots__, register the class as a pytree, or name `self` in static_argnums',
        ) from None


def without_self(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the bound method, where positions do not count `self`."""
    shifted = dict(options)
    for name in ("static_argnums", "donate_argnums"):
        if (given := options.get(name)) is not None:
            positions = given if isinstance(given, Iterable) else (given,)
            shifted[name] = tuple(position - 1 if position > 0 else position for position in positions)
    return shifted


def bound(fn: Callable[..., Any], instance: weakref.ref[Any]) -> Callable[..., Any]:
    """Return the function as a method of the object, without keeping the object alive."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(instance(), *args, **kwargs)

    functools.update_wrapper(call, fn)
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call
