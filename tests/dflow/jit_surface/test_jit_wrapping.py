"""Attributes of a jitted function: names, signature, methods, callables of every kind, copies."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import jax.numpy as jnp

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


def documented(x: int, *, scale: float = 2.0) -> float:
    """Scales."""
    return x * scale


documented.some_value = 4  # type: ignore[attr-defined]


class Callable_:  # noqa: N801
    """An object to call."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        """Multiplies."""
        return x * self.factor

    def method(self, x: Any) -> Any:
        return x + self.factor

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x, cls.__name__ == "Callable_"

    @staticmethod
    def of_nobody(x: Any) -> Any:
        return x


class Unprintable(Callable_):
    def __repr__(self) -> str:
        raise ValueError("this has no repr")


def classes(jit: Any) -> Any:
    class Model:
        factor = 3

        @functools.partial(jit, static_argnums=0)
        def by_number(self, x: Any) -> Any:
            return x * self.factor

        @classmethod
        @jit
        def twice(cls: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        @jit
        def half(x: Any) -> Any:
            return x / 2

        @property
        @functools.partial(jit, static_argnums=0)
        def squared(self) -> Any:
            return jnp.float32(self.factor) ** 2

        @functools.partial(jit, static_argnums=0)
        def __call__(self, x: Any) -> Any:
            return x + self.factor

        @functools.partial(jit, static_argnums=(0, 2))
        def several(self, x: Any, n: int, *, y: Any = 1.0) -> Any:
            return [x * self.factor + y] * n

    class Derived(Model):
        factor = 5

        @functools.partial(jit, static_argnums=0)
        def by_number(self, x: Any) -> Any:
            return super().by_number(x) + 1

    first, second = Model(), Derived()
    return (
        [m.by_number(1.0) for m in (first, second)],
        Model.half(3.0),
        first.half(3.0),
        second.squared,
        first(1.0),
        second.several(1.0, 2, y=3.0),
        Model.by_number(second, 1.0),
    )


def of_classmethod(jit: Any) -> Any:
    class Model:
        @jit
        @classmethod
        def twice(cls, x: Any) -> Any:
            return x * 2

    return Model.twice(1.0)


def recursion(jit: Any) -> Any:
    @functools.partial(jit, static_argnums=0)
    def power(n: int, x: Any) -> Any:
        return x if n == 0 else 2 * power(n - 1, x)

    return power(4, 1.0), power(2, 1.0)


def endless_recursion(jit: Any) -> Any:
    @jit
    def forever(x: Any) -> Any:
        return forever(x)

    try:
        return forever(1.0)
    except RecursionError as error:
        return type(error).__name__


def globals_of_the_wrapper(jit: Any) -> Any:
    f = jit(documented)
    names = ("__name__", "__doc__", "__module__", "__qualname__", "__annotations__", "some_value")
    return [repr(getattr(f, name)) for name in names], f.__wrapped__ is documented, str(inspect.signature(f))


def set_attribute(jit: Any) -> Any:
    f = jit(lambda x: x)
    f.remark = "mine"
    return f.remark, f(1.0), hasattr(f, "other")


def copies(jit: Any, make: Any) -> Any:
    f = jit(documented, static_argnames="scale")
    g = make(f)
    return g(3, scale=2.0), g is f


PROGRAMS: dict[str, Program] = {
    "its attributes": globals_of_the_wrapper,
    "its repr, of an object whose own raises": lambda jit: repr(jit(Unprintable(2))).endswith(">"),
    "attributes that are set": set_attribute,
    "copied": lambda jit: copies(jit, copy.copy),
    "deep-copied": lambda jit: copies(jit, copy.deepcopy),
    "as a static argument": lambda jit: (lambda f: jit(lambda g, x: g(x), static_argnums=0)(f, 2.0))(jit(documented)),
    "a ufunc of jnp": lambda jit: jit(jnp.add)(1.0, 2),
    "an object to call": lambda jit: jit(Callable_(3.0))(2.0),
    "methods in a class": classes,
    "jit of a class method": of_classmethod,
    "recursion": recursion,
    "endless recursion": endless_recursion,
}

#: These programs test the object itself, or functions that a wrapper would hide.
WITHOUT_STATE = (
    "its attributes",
    "jit of a class method",
)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
