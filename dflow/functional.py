"""JAX's functions, taking variables where they take arrays.

One rule makes `dflow.numpy`, `dflow.lax`, `dflow.nn` and `dflow.random` from JAX's modules of these names: a function
reads the variables among its arguments, at any depth of a pytree, and is otherwise JAX's function. All other members
(dtypes, constants, classes) are JAX's own objects. There are no numerics here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_origin

import jax
import jax.numpy as jnp

from dflow.tracing.state.resources import is_variable, read


def accepting(member: Any) -> Any:
    """Return a function that accepts variables; return any other object unchanged."""
    if isinstance(member, jnp.ufunc):
        return Ufunc(member)
    if not callable(member) or isinstance(member, type) or get_origin(member) is not None:
        return member
    return reading(member)


def reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function applied to the values of its variables, and so for any function that it returns."""

    @functools.wraps(function)
    def on_values(*args: Any, **kwargs: Any) -> Any:
        if _has_variable((args, kwargs)):
            args, kwargs = read((args, kwargs))
        return accepting(function(*args, **kwargs))

    return on_values


def _has_variable(tree: Any) -> bool:
    return any(map(is_variable, jax.tree_util.tree_leaves(tree, is_leaf=is_variable)))


class Ufunc:
    """A universal function of `jax.numpy` that accepts variables, also in its methods: `reduce`, `outer`, `at`."""

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
    """Return the public names of a module, which its mirror has too."""
    return [name for name in dir(source) if not name.startswith("_")]


def mirrored(name: str, source: ModuleType) -> Callable[[str], Any]:
    """Return the `__getattr__` of the module called `name`, which looks up the members of `source` on first use."""
    module = sys.modules[name]

    def find(member: str) -> Any:
        # Names with underscores are private, except the array API's; `__path__` would make the module a package.
        if member.startswith("_") and not member.startswith("__array_"):
            raise AttributeError(f"module {name!r} has no attribute {member!r}", name=member, obj=module)
        try:
            theirs = getattr(source, member)
        except AttributeError as error:
            message = f"module {name!r} has no attribute {member!r}, for {error}"
            raise AttributeError(message, name=member, obj=module) from None
        found = _mirror(f"{name}.{member}", theirs) if isinstance(theirs, ModuleType) else accepting(theirs)
        setattr(module, member, found)
        return found

    names = public_names(source)
    module.__dict__.update(__dir__=lambda: names, __all__=names)
    for member in names:
        if isinstance(source.__dict__.get(member), ModuleType):
            find(member)
    return find


def _mirror(name: str, source: ModuleType) -> ModuleType:
    """Return the module called `name` with the members of `source`; it can be imported by that name."""
    if name not in sys.modules:
        made = sys.modules[name] = ModuleType(name, source.__doc__)
        made.__dict__["__getattr__"] = mirrored(name, source)
    return sys.modules[name]
