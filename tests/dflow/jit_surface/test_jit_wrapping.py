"""Attributes of a jitted function: names, signature, methods, callables of every kind, copies."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    """One class with every kind of method."""

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


def made_in_init(jit: Any) -> Any:
    class Model:
        def __init__(self) -> None:
            self.factor = 3
            self.step = jit(self._step)

        def _step(self, x: Any) -> Any:
            return x * self.factor

    return [Model().step(1.0) for _ in range(2)]


def async_function(jit: Any) -> Any:
    async def fn(x: Any) -> Any:
        return x

    return jit(fn)(1.0)


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
    "its signature, of a partial": lambda jit: str(inspect.signature(jit(functools.partial(documented, scale=1.0)))),
    "its repr, of an object whose own raises": lambda jit: repr(jit(Unprintable(2))).endswith(">"),
    "callable": lambda jit: (callable(jit(documented)), inspect.isfunction(jit(documented))),
    "attributes that are set": set_attribute,
    "an attribute that is none": lambda jit: jit(lambda x: x).missing,
    "copied": lambda jit: copies(jit, copy.copy),
    "deep-copied": lambda jit: copies(jit, copy.deepcopy),
    "as a static argument": lambda jit: (lambda f: jit(lambda g, x: g(x), static_argnums=0)(f, 2.0))(jit(documented)),
    "a method of a builtin": lambda jit: jit("{}".format)(1.0),
    "a type": lambda jit: jit(dict)(a=1.0),
    "a named tuple's type": lambda jit: jit(complex)(1.0),
    "a ufunc of jnp": lambda jit: jit(jnp.add)(1.0, 2),
    "a jitted function": lambda jit: jit(jit(lambda x: x + 1))(2.0),
    "a function of jax.jit": lambda jit: jit(jax.jit(lambda x: x + 1))(2.0),
    "an object to call": lambda jit: jit(Callable_(3.0))(2.0),
    "an unbound method": lambda jit: jit(Callable_.method, static_argnums=0)(Callable_(3.0), 2.0),
    "methods in a class": classes,
    "jit of a class method": of_classmethod,
    "jit in __init__": made_in_init,
    "an async function": async_function,
    "recursion": recursion,
    "endless recursion": endless_recursion,
    "by a decorator factory": lambda jit: jit(static_argnums=0)(lambda n, x: [x] * n)(2, 3.0),
    "by a decorator factory without options": lambda jit: jit()(lambda x: x + 1)(3.0),
    "in np.vectorize": lambda jit: np.vectorize(jit(lambda x: x * 2))(np.arange(3.0)),
}

#: These programs test the object itself, or functions that a wrapper would hide.
WITHOUT_STATE = (
    "its attributes",
    "an async function",
    "jit of a class method",
    "a method of a builtin",
    "callable",
)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
