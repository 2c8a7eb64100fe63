"""Variables as arrays to JAX: leaves of pytrees, read where they are operands, with the attributes of their values."""

from __future__ import annotations

from typing import Any

import jax

from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import register_leaf, register_missing
from dflow.tracing.source import at, caller


def register_as_array(cls: type[Any]) -> None:
    """Have JAX take instances of a class of variables, which has `aval` and `read`, as their values."""
    own = set(dir(object)) | vars(cls).keys() | {"__slots__", "__weakref__"}
    for name in {*dir(jax.Array), "__dlpack__", "__dlpack_device__"} - own:
        setattr(cls, name, _of_value(name))
    register_leaf(cls, lambda variable: variable.aval, lambda variable: variable.read())
    of_variables = [name for name in vars(cls) if name.startswith(("assign", "gather", "scatter_"))]
    register_missing(["read", *of_variables], _not_on_arrays)


def _of_value(name: str) -> property:
    return property(lambda self: getattr(self.read(), name), doc=f"`{name}` of the value, as an array has it.")


def _not_on_arrays(name: str, array: Any) -> AttributeError:
    close_over = f"have the function close over the variable, and write w.{name}(...)"
    return AttributeError(
        f"a traced {array_type_of(array)} has no attribute {name!r}: a variable that is passed to a function of JAX's, "
        f"such as jax.grad, jax.lax.scan or jax.jit, is an array there{at(caller())}\n"
        f"  {'use it as it is' if name == 'read' else close_over}; functions of dflow.jit get the variable itself",
        name=name,
        obj=array,
    )
