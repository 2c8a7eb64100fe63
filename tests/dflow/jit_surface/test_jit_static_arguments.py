"""Static arguments, by each way to declare them."""

from __future__ import annotations

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class HashRaises:
    def __hash__(self) -> int:
        raise ValueError("no hash of mine")


class ReprRaises:
    def __repr__(self) -> str:
        raise ValueError("no repr of mine")


class AllEqual:
    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AllEqual)


def with_defaults(x: Any, n: int = 2, *, flag: bool = True) -> Any:
    return [x] * n if flag else x


def traces(jit: Any, fn: Any, calls: list[tuple[Any, ...]], **options: Any) -> Any:
    """Number of traces after each call."""
    count = [0]

    def counted(*args: Any) -> Any:
        count[0] += 1
        return fn(*args)

    f = jit(counted, **options)
    return [(f(*args), count[0])[1] for args in calls]


def tracers(jit: Any, *args: Any, options: dict[str, Any], **kwargs: Any) -> Any:
    """Return the names of the traced parameters."""
    found = {}

    def f(x: Any, y: Any) -> int:
        found.update(x=isinstance(x, jax.core.Tracer), y=isinstance(y, jax.core.Tracer))
        return 1

    jit(f, **options)(*args, **kwargs)
    return str(found)


def takes_method(jit: Any) -> Any:
    class Model:
        @functools.partial(jit, static_argnums=0)
        def scaled(self, x: Any) -> Any:
            return x * self.factor

        factor = 3

    model = Model()
    return model.scaled(2.0), Model.scaled(model, 2.0)


def by_name_self(jit: Any) -> Any:
    class Model:
        @functools.partial(jit, static_argnames=("self", "n"))
        def scaled(self, x: Any, n: int) -> Any:
            return [x] * n

    return Model().scaled(2.0, n=2), Model().scaled(2.0, 3)


def self_seen_anew(jit: Any) -> Any:
    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        def __hash__(self) -> int:
            return hash(self.factor)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Model) and self.factor == other.factor

        @functools.partial(jit, static_argnums=0)
        def scaled(self, x: Any) -> Any:
            return x * self.factor

    first, second = Model(2), Model(2)
    before = first.scaled(1.0), second.scaled(1.0)
    second.factor = 5
    return before, second.scaled(1.0), first.scaled(1.0)


PROGRAMS: dict[str, Program] = {
    "by a string as number": lambda jit: jit(lambda x, n: [x] * n, static_argnums="n")(2.0, 3),
    "by names in a list": lambda jit: jit(lambda x, n, m: [x] * (n + m), static_argnames=["m", "n"])(2.0, 3, m=1),
    "by negative number": lambda jit: jit(lambda x, n: [x] * n, static_argnums=-1)(2.0, 3),
    "by negative number, passed by name": lambda jit: jit(lambda x, n: [x] * n, static_argnums=-1)(2.0, n=3),
    "by negative number, with a default left out": lambda jit: jit(
        lambda x, n, m=1: [x] * (n + m), static_argnums=(-1, -2)
    )(2.0, 3),
    "a number too large": lambda jit: jit(lambda x: x, static_argnums=1)(2.0),
    "a number too large, with *args": lambda jit: jit(lambda x, *ys: [x, *ys], static_argnums=(0, 9))(2, 3.0),
    "no numbers of a function without parameters": lambda jit: jit(lambda: 1, static_argnums=())(),
    "positional-only by name": lambda jit: jit(lambda x, n, /: [x] * n, static_argnames="n")(2.0, 3),
    "a name within **kwargs": lambda jit: jit(lambda x, **named: [x] * named["n"], static_argnames="n")(2.0, n=3),
    "a name that is none": lambda jit: jit(lambda x: x, static_argnames="y")(2.0),
    "a default, left out": lambda jit: jit(with_defaults, static_argnums=1, static_argnames="flag")(2.0),
    "a default, by position": lambda jit: jit(with_defaults, static_argnames=("n", "flag"))(2.0, 3, flag=False),
    "a default, by name": lambda jit: jit(with_defaults, static_argnums=1, static_argnames="flag")(2.0, flag=True),
    "a default that is first": lambda jit: jit(lambda x=4: x, static_argnums=0)(),
    "numbers and names that disagree: 2": lambda jit: tracers(
        jit, 2, 3, options={"static_argnums": (), "static_argnames": "y"}
    ),
    "numbers and names that disagree: 4": lambda jit: tracers(
        jit, x="text", y=3, options={"static_argnums": 1, "static_argnames": "x"}
    ),
    "all static, all by name": lambda jit: tracers(jit, y="a", x="b", options={"static_argnums": (0, 1)}),
    "a function": lambda jit: jit(lambda f, x: f(x), static_argnums=0)(jnp.sin, 2.0),
    "NaN": lambda jit: traces(jit, lambda x, n: x, [(1.0, float("nan"))] * 2, static_argnums=1),
    "a list": lambda jit: jit(lambda x, n: x, static_argnums=1)(2.0, [3]),
    "a NumPy array": lambda jit: jit(lambda x, n: x, static_argnums=1)(2.0, np.ones(2)),
    "a hash that raises": lambda jit: jit(lambda x, n: x, static_argnums=1)(2.0, HashRaises()),
    "a repr that raises": lambda jit: jit(lambda x, n: x, static_argnums=1)(2.0, ReprRaises()),
    "a repr that raises, by name": lambda jit: jit(lambda x, n: x, static_argnames="n")(2.0, n=ReprRaises()),
    "equal values of several types": lambda jit: traces(
        jit, lambda x, n: x, [(1.0, 1), (1.0, True), (1.0, 1.0), (1.0, 1)], static_argnums=1
    ),
    "zero and minus zero": lambda jit: traces(jit, lambda x, n: x, [(1.0, 0.0), (1.0, -0.0)], static_argnums=1),
    "new values are traced": lambda jit: traces(
        jit, lambda x, n: [x] * n, [(1.0, 1), (1.0, 2), (2.0, 1), (2.0, 2), (1, 2)], static_argnums=1
    ),
    "self": takes_method,
    "self by name": by_name_self,
    "self that is equal to another": self_seen_anew,
    "of a partial with a keyword, by number": lambda jit: jit(functools.partial(with_defaults, n=3), static_argnums=1)(
        2.0
    ),
    "of a builtin": lambda jit: jit(pow, static_argnums=1)(jnp.ones(2), 3),
    "of a function without signature, by name": lambda jit: jit(max, static_argnames="key")(1, 2),
    "static and donated": lambda jit: jit(lambda x: x, static_argnums=0, donate_argnums=0)(1),
    "under grad": lambda jit: jax.grad(jit(lambda x, n: x**n, static_argnums=1))(2.0, 3),
    "a tracer as static": lambda jit: jit(lambda y: jit(lambda x, n: x, static_argnums=1)(1.0, y))(2.0),
}

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS)
