"""Static arguments, by each way to declare them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


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


PROGRAMS: dict[str, Program] = {
    "by a string as number": lambda jit: jit(lambda x, n: [x] * n, static_argnums="n")(2.0, 3),
    "by negative number, passed by name": lambda jit: jit(lambda x, n: [x] * n, static_argnums=-1)(2.0, n=3),
    "a number too large": lambda jit: jit(lambda x: x, static_argnums=1)(2.0),
    "positional-only by name": lambda jit: jit(lambda x, n, /: [x] * n, static_argnames="n")(2.0, 3),
    "a default, by name": lambda jit: jit(with_defaults, static_argnums=1, static_argnames="flag")(2.0, flag=True),
    "numbers and names that disagree: 2": lambda jit: tracers(
        jit, 2, 3, options={"static_argnums": (), "static_argnames": "y"}
    ),
    "a NumPy array": lambda jit: jit(lambda x, n: x, static_argnums=1)(2.0, np.ones(2)),
    "a repr that raises, by name": lambda jit: jit(lambda x, n: x, static_argnames="n")(2.0, n=ReprRaises()),
    "equal values of several types": lambda jit: traces(
        jit, lambda x, n: x, [(1.0, 1), (1.0, True), (1.0, 1.0), (1.0, 1)], static_argnums=1
    ),
    "zero and minus zero": lambda jit: traces(jit, lambda x, n: x, [(1.0, 0.0), (1.0, -0.0)], static_argnums=1),
    "self by name": by_name_self,
    "a tracer as static": lambda jit: jit(lambda y: jit(lambda x, n: x, static_argnums=1)(1.0, y))(2.0),
}

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS)
