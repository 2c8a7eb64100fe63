"""The result of JAX's ops for `Rowwise` arrays: elementwise ops, changes of shape within a row, and reductions.

The rows of one position are summed before an op that is not linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.jax_frontend import Equation
from dflow.tracing.rows.row_values import WIDENED, Fill, Index, RowResult, Rowwise, Whole, is_zero, made, on_rows

#: JAX's ops that compute each element of the result from the elements at its position.
ELEMENTWISE = frozenset(
    (
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil"),
        *("clamp", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf"),
        *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le"),
        *("lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or"),
        *("pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt"),
        *("square", "sub", "tan", "tanh", "xor", WIDENED),
    )
)
#: Ops that change a shape, and may leave the first dimension as it is.
_RESHAPES = ("broadcast_in_dim", "reshape", "squeeze")
#: Reductions to a number, of the rows that there are (`there`) and the number in all others.
_REDUCTIONS: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "reduce_sum": lambda rows, there, zero: jnp.sum(rows, where=there, dtype=rows.dtype),
    "reduce_max": lambda rows, there, other: jnp.max(rows, where=there, initial=other),
    "reduce_min": lambda rows, there, other: jnp.min(rows, where=there, initial=other),
    "reduce_or": lambda rows, there, other: jnp.bitwise_or.reduce(rows, axis=None, where=there) | other,
    "reduce_and": lambda rows, there, other: jnp.bitwise_and.reduce(rows, axis=None, where=there) & other,
}


def row_by_row(equation: Equation, operands: Sequence[Any]) -> Any:
    """The result of an equation, `Rowwise` or an array, computed from rows alone; None where that cannot be."""
    name = equation.primitive.name
    if name in ELEMENTWISE:
        return _elementwise(equation, operands)
    if name in _REDUCTIONS:
        return _reduced(equation, operands[0])
    if name in _RESHAPES and len(operands) == 1 and _keeps_rows(equation):
        return _of_rows(equation, operands[0], isinstance(operands[0].rest, Fill))
    return None


def _elementwise(equation: Equation, operands: Sequence[Any]) -> Rowwise | None:
    shape = equation.outvars[0].aval.shape
    if any(np.shape(operand) not in ((), shape) for operand in operands if not isinstance(operand, Rowwise)):
        return None
    values = _aligned(equation, operands)
    if values is None:
        return None
    rest = made(equation, [_rest(value) for value in values])
    index = next((value.index for value in values if _has_rows(value)), None)
    if index is None:
        return Rowwise(equation, operands, rest)
    rows = [_rows(value, index) for value in values]
    return Rowwise(equation, operands, rest, index, on_rows(equation, rows, index.positions.shape[0]))


def _has_rows(value: Any) -> bool:
    return isinstance(value, Rowwise) and value.index is not None


def _rest(value: Any) -> Any:
    if isinstance(value, Rowwise):
        return value.rest
    return Fill(value) if np.shape(value) == () else Whole(value)


def _rows(value: Any, index: Index) -> Any:
    if isinstance(value, Rowwise):
        return value.at(index)
    return value if np.shape(value) == () else jnp.asarray(value).at[index.positions].get(mode="clip")


def _aligned(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    """Return the operands with one common index for all that have an index; None if there can be none."""
    indices: list[Any] = list(dict.fromkeys(operand.index for operand in operands if _has_rows(operand)))
    values: list[Any] | None = list(operands)
    if len(indices) > 1:
        if len({index.unique for index in indices}) == 1:
            return [operand.unique if isinstance(operand, Rowwise) else operand for operand in operands]
        values = _joined(operands, indices)
    elif not indices or indices[0].is_unique:
        return values
    if values is None or _is_linear(equation, values):
        return values
    return [value.unique if isinstance(value, Rowwise) else value for value in values]


def _joined(operands: Sequence[Any], indices: Sequence[Index]) -> list[Any] | None:
    """Return sparse operands with one index: the positions of all, concatenated, and zeros for the rows of the others.

    None if an operand is not sparse, or the index would have as many positions as the array has rows.
    """
    count, sizes = indices[0].count, [index.positions.shape[0] for index in indices]
    if sum(sizes) >= count or not all(operand.is_sparse for operand in operands if _has_rows(operand)):
        return None
    joined = Index(jnp.concatenate([index.positions for index in indices]), count)

    def moved(operand: Rowwise) -> Rowwise:
        parts = [
            operand.rows if index is operand.index else jnp.zeros((size, *operand.rows.shape[1:]), operand.rows.dtype)
            for index, size in zip(indices, sizes, strict=True)
        ]
        return operand.moved(joined, jnp.concatenate(parts))

    return [moved(operand) if _has_rows(operand) else operand for operand in operands]


def _is_linear(equation: Equation, operands: Sequence[Any]) -> bool:
    """Whether rows of the same position may be summed after the equation instead of before it."""
    name, has_rows = equation.primitive.name, [*map(_has_rows, operands)]
    known = [*filter(_has_rows, operands)]
    if not all(operand.is_sparse for operand in known):
        return False
    if name in ("neg", "copy", "copy_p"):
        return True
    if any(operand.rows.dtype.itemsize < 4 for operand in known):
        return False  # a sum of few bits is to be rounded, or to overflow, as that of the dense gradient
    if name == "convert_element_type":
        was, will_be = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        return bool(jnp.issubdtype(was, jnp.number) and jnp.promote_types(was, will_be) == will_be)
    if name in ("add", "sub", "add_any"):
        return all(has_rows)
    if name in ("mul", "div"):
        return has_rows == [True, False] or (name == "mul" and has_rows == [False, True])
    return name == "select_n" and not has_rows[0] and all(has_rows[1:])


def _reduced(equation: Equation, operand: Rowwise) -> Any:
    name, axes = equation.primitive.name, tuple(equation.params["axes"])
    if operand.index is None:
        return None
    if name != "reduce_sum" or operand.rows.dtype.itemsize < 4:
        operand = operand.unique
    if not isinstance(operand.rest, Fill) or (name == "reduce_sum" and not is_zero(operand.rest)):
        return _of_rows(equation, operand, False) if 0 not in axes else None
    if 0 not in axes:
        return _of_rows(equation, operand, True)
    if len(axes) < len(operand.aval.shape):
        return None
    # Some row is in the rest, since no index has as many positions as there are rows.
    assert operand.index is not None
    return _REDUCTIONS[name](operand.rows, operand.index.is_there(operand.rows.ndim), operand.rest.value)


def _of_rows(equation: Equation, operand: Rowwise, keeps_rest: bool) -> Rowwise:
    """Apply an equation to each row. With `keeps_rest` the result has the operand's rest."""
    rest = operand.rest if keeps_rest else RowResult(equation, (operand.rest,))
    rows = None if operand.index is None else on_rows(equation, [operand.rows], operand.rows.shape[0])
    return Rowwise(equation, [operand], rest, operand.index, rows)


def _keeps_rows(equation: Equation) -> bool:
    """Whether a reshape, broadcast or similar op keeps the first dimension first."""
    given, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    dims = equation.params.get("broadcast_dimensions")
    is_permuted = equation.primitive.name == "reshape" and equation.params["dimensions"] is not None
    return bool(given and result) and given[0] == result[0] and (dims is None or dims[0] == 0) and not is_permuted
