"""Values that may be arguments or results, and the types of the results."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit

Pair = namedtuple("Pair", "left right")


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


PROGRAMS: dict[str, Program] = {
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
}

#: Functions with state return uncommitted arrays on the devices of their state.
WITHOUT_STATE = (
    "a backend",
    "a float too large",
    "results: a shape",
    "an array of a NamedSharding",
)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
