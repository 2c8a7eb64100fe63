"""Compiled functions as methods of objects that are no pytrees."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from dflow.calls.static_arguments import positions_in
from dflow.tracing.errors import DflowError


class BoundMethod:
    """A function as the method of an object; keeps the object alive, like Python's bound methods."""

    def __init__(self, instance: Any, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__self__ = instance

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__wrapped__, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundMethod):
            return NotImplemented
        return self.__self__ is other.__self__ and self.__wrapped__ is other.__wrapped__

    def __hash__(self) -> int:
        return hash((id(self.__self__), id(self.__wrapped__)))

    def __repr__(self) -> str:
        return f"<bound {self.__wrapped__!r} of {self.__self__!r}>"


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
            shifted[name] = tuple(position - 1 if position > 0 else position for position in positions_in(given))
    return shifted


def bound(fn: Callable[..., Any], instance: weakref.ref[Any]) -> Callable[..., Any]:
    """Return the function as a method of the object, without keeping the object alive."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(instance(), *args, **kwargs)

    functools.update_wrapper(call, fn)
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call
