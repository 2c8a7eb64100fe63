"""The variables, queues and accumulators that a function refers to, to detect that a trace of it is out of date.

A trace uses the variables of its time. If a name in the function refers to another variable later, the trace is no
longer valid for the function.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from dflow.tracing.jax_frontend import Handle, is_resource
from dflow.tracing.source import is_installed, is_user_file

#: Objects looked at for one function; a call takes some ms for as many.
MOST = 10_000

_WITHOUT_PARTS = (ModuleType, type, str, bytes, int, float, complex, np.ndarray, np.generic)


def reachable(fn: Any) -> list[Handle] | None:
    """The handles of the resources reachable from `fn`; None if there are too many objects to search.

    The search follows closures, defaults and globals of functions, items of containers and attributes of objects. It
    skips attributes of modules and classes, objects without a `__dict__`, and globals of installed libraries.
    """
    found: list[Handle] = []
    seen: dict[int, Any] = {}
    left = [fn]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, _WITHOUT_PARTS):
            continue
        if len(seen) == MOST:
            return None
        seen[id(value)] = value
        if "handle" in getattr(value, "__dict__", ()) and is_resource(value):
            found.append(value.handle)
        else:
            left.extend(_parts(value))
    return found


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    attributes = getattr(value, "__dict__", {})
    # A compiled function keeps more than what its function names.
    return [attributes["__wrapped__"]] if "__wrapped__" in attributes else list(attributes.values())


def _parts_of_function(fn: FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        with suppress(ValueError):  # a name that stands for nothing yet
            yield cell.cell_contents
    yield from (fn.__defaults__, fn.__kwdefaults__)
    if is_user_file(file := fn.__code__.co_filename) and not is_installed(file):
        yield from (fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function uses, and those defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
