"""Attributes of a jitted function: names, signature, methods, callables of every kind, copies."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
import weakref
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


class Child(Callable_):
    def method(self, x: Any) -> Any:
        return super().method(x) * 2


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


def an_attribute_of_an_object(jit: Any) -> Any:
    """A function that is an attribute of an object is not a method."""
    holder = types.SimpleNamespace(step=jit(lambda x: x * 2))
    return holder.step(1.0)


def a_class_attribute_of_static_self(jit: Any) -> Any:
    class Model:
        step = jit(lambda self, x: x * 2, static_argnums=0)

    return Model().step(1.0)


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


def reentrant(jit: Any) -> Any:
    """The Python function calls the jitted one on other arguments, not in its trace."""

    @jit
    def fn(x: Any) -> Any:
        if x.ndim:
            with jax.ensure_compile_time_eval():
                return x + fn(1.0)
        return x * 2

    return fn(jnp.ones(2)), fn(3.0)


def closed_over_and_changed(jit: Any) -> Any:
    """Closed-over values are read when the function is traced."""
    factor = [2.0]
    f = jit(lambda x: x * factor[0])
    before = f(1.0)
    factor[0] = 3.0
    return before, f(1.0), f(1)


def globals_of_the_wrapper(jit: Any) -> Any:
    f = jit(documented)
    names = ("__name__", "__doc__", "__module__", "__qualname__", "__annotations__", "some_value")
    return [repr(getattr(f, name)) for name in names], f.__wrapped__ is documented, str(inspect.signature(f))


def set_attribute(jit: Any) -> Any:
    f = jit(lambda x: x)
    f.remark = "mine"
    return f.remark, f(1.0), hasattr(f, "other")


def equality(jit: Any) -> Any:
    f, g = jit(documented), jit(documented)
    return f == f, f == g, hash(f) == hash(f), len({f, f}), f in [f]


def copies(jit: Any, make: Any) -> Any:
    f = jit(documented, static_argnames="scale")
    g = make(f)
    return g(3, scale=2.0), g is f


def weak_reference(jit: Any) -> Any:
    f = jit(lambda x: x)
    reference = weakref.ref(f)
    alive = reference() is f
    return alive, f(1.0)


def of_wraps(jit: Any) -> Any:
    @jit
    @functools.wraps(documented)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return documented(*args, **kwargs)

    return wrapped(3, scale=1.5), wrapped.__name__


PROGRAMS: dict[str, Program] = {
    "its attributes": globals_of_the_wrapper,
    "its own signature": lambda jit: str(inspect.signature(jit(lambda x, *, y=1: x), follow_wrapped=False)),
    "its signature, of a partial": lambda jit: str(inspect.signature(jit(functools.partial(documented, scale=1.0)))),
    "its repr, of an object whose own raises": lambda jit: repr(jit(Unprintable(2))).endswith(">"),
    "callable": lambda jit: (callable(jit(documented)), inspect.isfunction(jit(documented))),
    "attributes that are set": set_attribute,
    "an attribute that is none": lambda jit: jit(lambda x: x).missing,
    "equality and hash": equality,
    "copied": lambda jit: copies(jit, copy.copy),
    "deep-copied": lambda jit: copies(jit, copy.deepcopy),
    "weakly referred to": weak_reference,
    "as a static argument": lambda jit: (lambda f: jit(lambda g, x: g(x), static_argnums=0)(f, 2.0))(jit(documented)),
    "a builtin": lambda jit: jit(abs)(jnp.array(-1.0)),
    "an operator with a static argument": lambda jit: jit(operator.add, static_argnums=1)(jnp.arange(2), 1),
    "a method of a builtin": lambda jit: jit("{}".format)(1.0),
    "a type": lambda jit: jit(dict)(a=1.0),
    "a named tuple's type": lambda jit: jit(complex)(1.0),
    "a ufunc of jnp": lambda jit: jit(jnp.add)(1.0, 2),
    "a jitted function": lambda jit: jit(jit(lambda x: x + 1))(2.0),
    "a function of jax.jit": lambda jit: jit(jax.jit(lambda x: x + 1))(2.0),
    "a tree_util.Partial": lambda jit: jit(jax.tree_util.Partial(lambda a, x: a * x, 3))(2.0),
    "an object to call": lambda jit: jit(Callable_(3.0))(2.0),
    "a bound method of a child": lambda jit: jit(Child(3.0).method)(2.0),
    "an unbound method": lambda jit: jit(Callable_.method, static_argnums=0)(Callable_(3.0), 2.0),
    "methods in a class": classes,
    "jit of a class method": of_classmethod,
    "jit in __init__": made_in_init,
    "as an attribute": an_attribute_of_an_object,
    "as a class attribute": a_class_attribute_of_static_self,
    "an async function": async_function,
    "recursion": recursion,
    "endless recursion": endless_recursion,
    "reentrancy": reentrant,
    "a closure that changes": closed_over_and_changed,
    "of functools.wraps": of_wraps,
    "by a decorator factory": lambda jit: jit(static_argnums=0)(lambda n, x: [x] * n)(2, 3.0),
    "by a decorator factory without options": lambda jit: jit()(lambda x: x + 1)(3.0),
    "jit of jit with options": lambda jit: jit(jit(lambda n, x: [x] * n, static_argnums=0), static_argnums=0)(2, 3.0),
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
