"""Values that a user gives for an array: conversion to an array, its type, and errors for other values."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.argument_ids import has_texts
from dflow.tracing.element_arrays import plain_array
from dflow.tracing.errors import GraphTypeError, VariableError
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.number_range import check_number

#: A first value, or a function without arguments that gives it, run where the variable lives.
Initial = Any | Callable[[], Any]


class TypedInitial(ABC):
    """A function without arguments that gives a first value of a known type."""

    type: ArrayType

    @abstractmethod
    def __call__(self) -> Any:
        """The value."""


def given_array(value: Any, refusal: Callable[[str], Exception]) -> Any:
    """The value as an array. For another value, raise `refusal("a str, which is no array")`; JAX's own errors pass."""
    try:
        return jnp.asarray(value)
    except (jax.errors.JAXTypeError, GraphTypeError):
        raise
    except (TypeError, ValueError):
        raise refusal(f"{_noun(value)}, which {'has no numbers' if has_texts(value) else 'is no array'}") from None


def _noun(value: Any) -> str:
    return f"an array of {value.dtype}" if hasattr(value, "dtype") else f"a {type(value).__name__}"


def converted(value: Any, wanted: ArrayType) -> Any:
    """The value as an array. A Python number is converted to the wanted dtype if that is of its kind or wider."""
    given, array = array_type_of(value), value if hasattr(value, "dtype") else jnp.asarray(value)
    if not given.weak or jnp.issubdtype(wanted.dtype, jax.dtypes.extended):
        return array
    both_floating = all(jnp.issubdtype(type.dtype, jnp.floating) for type in (given, wanted))
    is_same_kind = both_floating or jnp.promote_types(given.dtype, wanted.dtype) == wanted.dtype
    return jax.lax.convert_element_type(array, wanted.dtype) if is_same_kind else array


def initial_type(initial: Initial, name: str | None) -> ArrayType:
    """The type that a variable with this initial value has, without computing it.

    Raises VariableError unless it is an array, or a function without arguments that returns one.
    """
    if isinstance(initial, TypedInitial):
        return initial.type
    if callable(initial):
        check_needs_nothing(initial, name)
        return struct_type(jax.eval_shape(initial), name)
    if hasattr(initial, "dtype") and not has_texts(initial):
        return array_type_of(initial).strong
    return array_type_of(given_array(initial, lambda what: _no_beginning(what, name))).strong


def of_function(initial: Callable[[], Any], dtype: Any, what: str) -> Callable[[], Any]:
    """The function, giving arrays for tensors of other libraries, of the dtype if that is given."""

    @wraps(initial, updated=())
    def value() -> Any:
        made = plain_array(initial(), what)
        if dtype is None:
            check_number(made, what)
            return made
        return jnp.asarray(made, dtype)

    return value


def struct_type(struct: Any, name: str | None) -> ArrayType:
    """The type of a variable whose initialiser returns `struct`. Raises VariableError unless that is one array."""
    if not isinstance(struct, jax.ShapeDtypeStruct):
        raise _no_beginning(f"a {type(struct).__name__}, which is no array", name)
    return array_type_of(struct).strong


def _no_beginning(what: str, name: str | None) -> VariableError:
    return VariableError(
        f"variable {name or 'unnamed'!r} cannot begin with {what}",
        "give it an array, a number, or a function without arguments that returns one; of a whole pytree of them"
        "\n  dflow.variables(tree) makes variables",
    )


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def check_needs_nothing(initial: Callable[..., Any], name: str | None) -> None:
    """Raise VariableError for a function that cannot be called without arguments."""
    needed = needed_arguments(initial)
    if needed:
        raise VariableError(
            f"the initialiser of variable {name or 'unnamed'!r} is called without arguments, but needs "
            f"{', '.join(needed)}",
            f"wrap it: dflow.Variable(lambda: initialiser({', '.join(needed)}))",
        )
