"""JAX's functions, taking variables where they take arrays.

One rule makes `dflow.numpy`, `dflow.lax`, `dflow.nn` and `dflow.random` from JAX's modules of these names: a function
reads the variables among its arguments, however deep in a pytree they are, and is JAX's function otherwise. All else
(dtypes, constants, classes) is JAX's own object. No numerics are here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_origin

import jax
import jax.numpy as jnp

from dflow.tracing.resources import is_variable, read


def accepting(member: Any) -> Any:
    """A function made to accept variables; what is no function is given back as it is."""
    if isinstance(member, jnp.ufunc):
        return Ufunc(member)
    if not callable(member) or isinstance(member, type) or get_origin(member) is not None:
        return member
    return reading(member)


def reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the values of the variables it is given; so is a function that it returns."""

    @functools.wraps(function)
    def on_values(*args: Any, **kwargs: Any) -> Any:
        if _has_variable((args, kwargs)):
            args, kwargs = read((args, kwargs))
        return accepting(function(*args, **kwargs))

    return on_values


def _has_variable(tree: Any) -> bool:
    return any(map(is_variable, jax.tree_util.tree_leaves(tree, is_leaf=is_variable)))


class Ufunc:
    """A universal function of `jax.numpy` that accepts variables, in its methods too: `reduce`, `outer`, `at`."""

    def __init__(self, ufunc: jnp.ufunc) -> None:
        functools.update_wrapper(self, ufunc)
        self._ufunc = ufunc
        self._apply = reading(ufunc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return accepting(getattr(self._ufunc, name))

    def __dir__(self) -> list[str]:
        return dir(self._ufunc)

    def __repr__(self) -> str:
        return repr(self._ufunc)


def public_names(source: ModuleType) -> list[str]:
    """The names that a mirror of this module has."""
    return [name for name in dir(source) if not name.startswith("_")]


def mirror(name: str, source: ModuleType) -> ModuleType:
    """A module called `name` with the members of `source`, importable by that name."""
    if name not in sys.modules:
        made = ModuleType(name, source.__doc__)
        fill(made, source)
        sys.modules[name] = made
    return sys.modules[name]


def fill(module: ModuleType, source: ModuleType) -> None:
    """Let `module` find the members of `source` when they are first asked for."""

    def find(name: str) -> Any:
        # Of the names with underscores, the array API's alone are for users; `__path__` would make a package of it.
        if name.startswith("_") and not name.startswith("__array_"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)
        try:
            member = getattr(source, name)
        except AttributeError as error:
            message = f"module {module.__name__!r} has no attribute {name!r}, for {error}"
            raise AttributeError(message, name=name, obj=module) from None
        inner = isinstance(member, ModuleType)
        made = mirror(f"{module.__name__}.{name}", member) if inner else accepting(member)
        setattr(module, name, made)
        return made

    names = public_names(source)
    module.__dict__.update(__getattr__=find, __dir__=lambda: names, __all__=names)
    for name in names:
        if isinstance(source.__dict__.get(name), ModuleType):
            find(name)
