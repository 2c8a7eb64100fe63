"""Integers of a program that are known while it is traced: constants, and sizes of arguments, which may be open.

Why: the shapes of a program's arrays are computed by its ops, from the sizes of its arguments. A trace needs them as
numbers, not as arrays.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.exporting.converting.stablehlo_attributes import attribute, dtype_of, literal, numbers, shape_of

#: Most integers of an array that may be sizes.
_MOST = 16


@dataclass(frozen=True, eq=False)
class Sizes:
    """Integers, or dimensions of open sizes, in an array of objects; `dtype` is that of the program."""

    values: np.ndarray[Any, Any]
    dtype: Any


def as_array(value: Any) -> Any:
    """Return a value as an array for `jax.lax`: sizes become an array of their dtype."""
    if not isinstance(value, Sizes):
        return value
    flat = value.values.reshape(-1)
    if all(isinstance(one, int | np.integer) for one in flat):
        return np.array([int(one) for one in flat], value.dtype).reshape(value.values.shape)
    made = [jnp.asarray(one).astype(value.dtype) for one in flat]
    return jnp.stack(made).reshape(value.values.shape)


def sizes_of_op(name: str, op: Any, given: Sequence[Any]) -> Sizes | None:
    """Return the result of an op of a program if it is known; None for another one."""
    if name == "get_dimension_size":
        [dim] = [given[0].shape[int(attribute(op, "dimension"))]]
        return Sizes(np.array(dim, object), dtype_of(op.results[0].type))
    if name not in _RULES or not all(isinstance(one, Sizes) for one in given):
        return None
    type = op.results[0].type
    if not jnp.issubdtype(dtype_of(type), np.integer):
        return None
    try:
        found = _RULES[name](op, [one.values for one in given])
    except jax.errors.ConcretizationTypeError:  # a comparison of open sizes
        return None
    return None if found is None else Sizes(np.asarray(found, object).reshape(shape_of(type)), dtype_of(type))


def divided_sizes(function: str, given: Sequence[Any]) -> list[Sizes] | None:
    """Return the results of a function that JAX makes to divide sizes, if these are known; None for another one."""
    found = re.fullmatch(r"(floor_divide|remainder|divmod)(_\d+)?", function)
    if found is None or not all(isinstance(one, Sizes) for one in given[-2:]):
        return None
    one, two = given[-2:]
    rules = {
        "floor_divide": [operator.floordiv],
        "remainder": [operator.mod],
        "divmod": [operator.floordiv, operator.mod],
    }
    return [Sizes(np.asarray(rule(one.values, two.values), object), one.dtype) for rule in rules[found[1]]]


def _constant(op: Any, _: Sequence[Any]) -> Any:
    if int(np.prod(shape_of(op.results[0].type))) > _MOST:
        return None
    return np.asarray(literal(op), object)


def _larger(one: Any, other: Any) -> Any:
    return np.vectorize(jax.core.max_dim, otypes=[object])(one, other)


def _smaller(one: Any, other: Any) -> Any:
    return np.vectorize(jax.core.min_dim, otypes=[object])(one, other)


def _sliced(op: Any, given: Sequence[Any]) -> Any:
    bounds = (numbers(op, name) for name in ("start_indices", "limit_indices", "strides"))
    return given[0][tuple(slice(*each) for each in zip(*bounds, strict=True))]


def _two(fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda op, given: fn(*given)


_RULES: Mapping[str, Callable[[Any, Sequence[Any]], Any]] = {
    "constant": _constant,
    "add": _two(operator.add),
    "subtract": _two(operator.sub),
    "multiply": _two(operator.mul),
    "divide": _two(operator.floordiv),
    "remainder": _two(operator.mod),
    "maximum": _two(_larger),
    "minimum": _two(_smaller),
    "negate": lambda op, given: -given[0],
    "convert": lambda op, given: given[0],
    "reshape": lambda op, given: given[0],
    "broadcast_in_dim": lambda op, given: np.broadcast_to(given[0], shape_of(op.results[0].type)),
    "concatenate": lambda op, given: np.concatenate(given),
    "slice": _sliced,
}
