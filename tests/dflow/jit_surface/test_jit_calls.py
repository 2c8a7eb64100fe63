"""Arguments and results of a jitted function, and its attributes: names, signature, methods, callables, copies."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


@jax.tree_util.register_pytree_node_class
class Matrix:
    """A pytree node that refuses children other than matrices, like classes that check their fields."""

    def __init__(self, data: Any) -> None:
        if data.ndim != 2:
            raise ValueError("no matrix")
        self.data = data

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.data,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Matrix:
        return cls(*children)


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    weight: Any
    bias: Any
    name: str = field(metadata={"static": True}, default="layer")


@jax.tree_util.register_pytree_with_keys_class
class WithKeys:
    def __init__(self, x: Any, tag: str) -> None:
        self.x, self.tag = x, tag

    def tree_flatten_with_keys(self) -> Any:
        return ((jax.tree_util.GetAttrKey("x"), self.x),), self.tag

    @classmethod
    def tree_unflatten(cls, tag: str, leaves: Any) -> WithKeys:
        return cls(*leaves, tag)


@jax.tree_util.register_pytree_node_class
class BadFlatten:
    def tree_flatten(self) -> Any:
        raise KeyError("no leaves of mine")

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> BadFlatten:
        return cls()


class HasJaxArray:
    def __init__(self, size: int = 3) -> None:
        self._size = size

    def __jax_array__(self) -> Any:
        return jnp.arange(float(self._size))


def echo(jit: Any, *args: Any) -> Any:
    """Pass the arguments through a function that returns them, unchanged and slightly changed."""
    return jit(lambda *xs: (xs, jax.tree.map(lambda x: x + x, xs)))(*args)


def returned(value: Any) -> Program:
    return lambda jit: jit(lambda x: value)(1.0)


class ReprRaises:
    def __repr__(self) -> str:
        raise ValueError("no repr of mine")


def with_defaults(x: Any, n: int = 2, *, flag: bool = True) -> Any:
    return [x] * n if flag else x


def traces(jit: Any, fn: Any, calls: list[tuple[Any, ...]], **options: Any) -> Any:
    count = [0]

    def counted(*args: Any) -> Any:
        count[0] += 1
        return fn(*args)

    f = jit(counted, **options)
    return [(f(*args), count[0])[1] for args in calls]


def tracers(jit: Any, *args: Any, options: dict[str, Any], **kwargs: Any) -> Any:
    found = {}

    def f(x: Any, y: Any) -> int:
        found.update(x=isinstance(x, jax.core.Tracer), y=isinstance(y, jax.core.Tracer))
        return 1

    jit(f, **options)(*args, **kwargs)
    return str(found)


def by_name_self(jit: Any) -> Any:
    class Model:
        @functools.partial(jit, static_argnames=("self", "n"))
        def scaled(self, x: Any, n: int) -> Any:
            return [x] * n

    return Model().scaled(2.0, n=2), Model().scaled(2.0, 3)


def lost(jit: Any, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the results and the deleted arguments of a first and a second call."""
    f = jit(fn, **options)
    seen = []
    for _ in range(2):
        given = jax.tree.map(lambda x: jnp.array(x, copy=True), (args, kwargs or {}))
        results = f(*given[0], **given[1])
        seen.append((results, [leaf.is_deleted() for leaf in jax.tree.leaves(given)]))
    return seen


def again(jit: Any) -> Any:
    f = jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.ones(3)
    f(x)
    return f(x)


def under_grad(jit: Any) -> Any:
    f = jit(lambda x: (x**2).sum(), donate_argnums=0)
    x = jnp.ones(3)
    return jax.grad(f)(x), jax.grad(f)(x), x


ARGUMENTS: dict[str, Program] = {
    "Python numbers": lambda jit: echo(jit, True, 2, 3.0, 4j),
    "NumPy arrays of 64 bits": lambda jit: echo(jit, np.ones(3), np.arange(3), np.ones(2, np.complex128)),
    "a NumPy array of another byte order": lambda jit: echo(jit, np.arange(3, dtype=">f4")),
    "weak arrays": lambda jit: echo(jit, jnp.asarray(1.0), jnp.broadcast_to(2, (3,)), jnp.float32(1)),
    # dflow has an error of its own for larger ones: see tests/dflow/test_number_range.py.
    "an unsigned integer of 64 bits": lambda jit: jit(lambda x: x)(np.uint64(2**32 - 1)),
    "a float too large": lambda jit: jit(lambda x: x)(1e300),
    "a string": lambda jit: echo(jit, "text"),
    "a string by name": lambda jit: jit(lambda x, *, mode: x)(1.0, mode="up"),
    "things with __jax_array__ of several shapes": lambda jit: (
        lambda f: [f(HasJaxArray(3)), f(HasJaxArray(4)), f(HasJaxArray(3))]
    )(jit(lambda x: jnp.asarray(x) * x.shape[0])),
    "a static field is another trace": lambda jit: (
        lambda f: [f(Layer(1.0, 2.0, "a")), f(Layer(1.0, 2.0, "b")), f(Layer(1.0, 2.0, "a"))]
    )(jit(lambda p: p.weight * (2 if p.name == "b" else 3))),
    "a bad leaf of a pytree with keys": lambda jit: jit(lambda w: w)(WithKeys("text", "t")),
    "a pytree whose flattening raises": lambda jit: jit(lambda w: 1)(BadFlatten()),
    "float0 of a gradient": lambda jit: jax.grad(jit(lambda x, n: x * n), argnums=(0, 1), allow_int=True)(2.0, 3),
    "results: a string": returned("text"),
    "results: a shape": returned(jax.ShapeDtypeStruct((), jnp.float32)),
    "a deleted argument": lambda jit: (lambda x: (x.delete(), jit(lambda x: x + 1)(x)))(jnp.ones(3)),
    "a backend": lambda jit: jit(lambda x: x + 1, backend="cpu")(1.0),
    "arguments called self, fn, args, kwargs": lambda jit: jit(
        lambda self, fn, args, kwargs: self - fn + args * kwargs
    )(self=1.0, fn=2.0, args=3.0, kwargs=4.0),
    "an array of a NamedSharding": lambda jit: jit(lambda x: x + 1)(
        jax.device_put(jnp.ones(4), jax.NamedSharding(jax.make_mesh((1,), ("i",)), jax.P("i")))
    ),
    "a class that checks its children": lambda jit: jit(lambda m, n: Matrix(m.data @ n["n"].data).data)(
        Matrix(jnp.ones((2, 3))), n={"n": Matrix(jnp.ones((3, 2)))}
    ),
    "static: by a string as number": lambda jit: jit(lambda x, n: [x] * n, static_argnums="n")(2.0, 3),
    "static: by negative number, passed by name": lambda jit: jit(lambda x, n: [x] * n, static_argnums=-1)(2.0, n=3),
    "static: a number too large": lambda jit: jit(lambda x: x, static_argnums=1)(2.0),
    "static: positional-only by name": lambda jit: jit(lambda x, n, /: [x] * n, static_argnames="n")(2.0, 3),
    "static: a default, by name": lambda jit: jit(with_defaults, static_argnums=1, static_argnames="flag")(
        2.0, flag=True
    ),
    "static: numbers and names that disagree: 2": lambda jit: tracers(
        jit, 2, 3, options={"static_argnums": (), "static_argnames": "y"}
    ),
    "static: a NumPy array": lambda jit: jit(lambda x, n: x, static_argnums=1)(2.0, np.ones(2)),
    "static: a repr that raises, by name": lambda jit: jit(lambda x, n: x, static_argnames="n")(2.0, n=ReprRaises()),
    "static: equal values of several types": lambda jit: traces(
        jit, lambda x, n: x, [(1.0, 1), (1.0, True), (1.0, 1.0), (1.0, 1)], static_argnums=1
    ),
    "static: zero and minus zero": lambda jit: traces(jit, lambda x, n: x, [(1.0, 0.0), (1.0, -0.0)], static_argnums=1),
    "static: self by name": by_name_self,
    "static: a tracer as static": lambda jit: jit(lambda y: jit(lambda x, n: x, static_argnums=1)(1.0, y))(2.0),
    "donated: by number, passed by name": lambda jit: lost(
        jit, lambda x, y: x + y, (), {"x": jnp.ones(3), "y": jnp.ones(3)}, donate_argnums=1
    ),
    "donated: beside static ones, by number": lambda jit: (
        lambda f: [(f(2, x, 3), x.is_deleted()) for x in (jnp.ones(3), jnp.ones(3))]
    )(jit(lambda n, x, m: x * (n + m), static_argnums=(0, 2), donate_argnums=1)),
    "donated: unused": lambda jit: lost(jit, lambda x, y: y, (jnp.ones(3), jnp.ones(2)), donate_argnums=0),
    "donated: one array given away twice": lambda jit: (lambda f, x: f(x, x))(
        jit(lambda x, y: (x + 1, y + 2), donate_argnums=(0, 1)), jnp.zeros(3)
    ),
    "donated: given away again": again,
    "donated: under grad": under_grad,
}

#: Functions with state return uncommitted arrays on the devices of their state. Under a transform that runs
#: immediately, they donate nothing.
ARGUMENTS_WITHOUT_STATE = (
    "a backend",
    "a float too large",
    "results: a shape",
    "an array of a NamedSharding",
    "donated: under grad",
)

test_arguments_are_the_same_as_under_jax_jit = same_as_jax_jit(ARGUMENTS, only_without_state=ARGUMENTS_WITHOUT_STATE)


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


WRAPPERS: dict[str, Program] = {
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
WRAPPERS_WITHOUT_STATE = (
    "its attributes",
    "jit of a class method",
)

test_wrappers_are_the_same_as_under_jax_jit = same_as_jax_jit(WRAPPERS, only_without_state=WRAPPERS_WITHOUT_STATE)
