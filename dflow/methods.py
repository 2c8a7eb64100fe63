"""Compiled functions as methods of objects that JAX knows nothing of."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from dflow.static_arguments import positions_in


class BoundMethod:
    """A function as the method of an object, which it keeps alive as Python's methods do."""

    def __init__(self, instance: Any, function: Callable[..., Any]) -> None:
        self.__self__ = instance
        self.__wrapped__ = function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


def without_self(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a method that is bound: positions count from the parameter after `self`."""
    shifted = dict(options)
    for name in ("static_argnums", "donate_argnums"):
        if (given := options.get(name)) is not None:
            shifted[name] = tuple(position - 1 if position > 0 else position for position in positions_in(given))
    return shifted


def bound(fn: Callable[..., Any], instance: weakref.ref[Any]) -> Callable[..., Any]:
    """The function as a method of an object that it does not keep alive."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(instance(), *args, **kwargs)

    functools.update_wrapper(call, fn)
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call
