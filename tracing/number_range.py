"""Numbers that JAX would change or refuse: it keeps 32 bits of each unless `jax_enable_x64` is set.

An integer of NumPy beyond 32 bits would become another integer, and so another row of a table: an error. So is one of
Python, for which JAX has an OverflowError of its own, without the line and a remedy. A float beyond float32
would become an infinity: a warning, since a program may expect it. Other rounding is JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from dflow.tracing.errors import NumberRangeError
from dflow.tracing.jax_frontend import keeps_64_bits
from dflow.tracing.source import at, caller, warn_at

_NUMPY = (np.ndarray, np.generic)
_WIDE = np.dtype(np.float64).itemsize
_OF_PYTHON = np.iinfo(np.int32)
_OF_INTEGERS = {"i": np.iinfo(np.int32), "u": np.iinfo(np.uint32)}

_WIDER = (
    "set jax.config.update('jax_enable_x64', True), or look ids up in a table with a vocabulary, dflow.Vocabulary(), or"
)

#: Place and value of the first number that is lost, and how many others are.
_Lost = tuple[tuple[int, ...], Any, int]


class NumberRangeWarning(RuntimeWarning):
    """A float64 number is beyond float32 and becomes an infinity; the message has the number and its position."""


def is_of_python(value: Any) -> bool:
    """Whether the value is a number of Python, or lists of them, which JAX converts to any dtype that holds them."""
    return all(type(leaf) in (bool, int, float, complex) for leaf in jax.tree_util.tree_leaves(value))


def check_number(value: Any, what: str) -> None:
    """Raise NumberRangeError for integers of NumPy or Python beyond 32 bits; warn for NumPy's floats beyond float32.

    value  an array, a number, or nested lists and tuples of them, which stand for one array
    what   the noun for the value in the message, such as `argument 'ids'`

    Any other value passes, and so does every value if `jax_enable_x64` is set.
    """
    if isinstance(value, list | tuple):
        _check_list(value, what)
    elif is_wide(value) and not keeps_64_bits():
        _check(value, what)


def check_numbers(values: Sequence[Any], names: Callable[[], Iterable[str]]) -> None:
    """Call `check_number` for each of the arrays and numbers; `names` returns their names in messages."""
    if any(map(is_wide, values)) and not keeps_64_bits():
        for index, value in enumerate(values):
            if is_wide(value):
                _check(value, lambda: list(names())[index])  # noqa: B023


def _check_list(value: Any, what: str) -> None:
    leaves = jax.tree_util.tree_leaves(value)
    if any(map(is_wide, leaves)) and not keeps_64_bits():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if is_wide(leaf):
                _check(leaf, what, tuple(getattr(key, "idx", key) for key in path))


def refusal_of_integers(values: Sequence[Any], names: Callable[[], Iterable[str]]) -> NumberRangeError | None:
    """Return the error about the first integer of Python that `check_numbers` refuses, if there is one."""
    for index, value in enumerate(values):
        if type(value) is int and is_wide(value) and not keeps_64_bits():
            return _of_integer(value, list(names())[index], "")
    return None


def is_wide(value: Any) -> bool:
    """Whether the value is an integer of Python beyond 32 bits, or one or more 64-bit numbers of NumPy."""
    if type(value) is int:
        return not _OF_PYTHON.min <= value <= _OF_PYTHON.max
    return isinstance(value, _NUMPY) and value.dtype.itemsize >= _WIDE and value.dtype.kind in "iufc"


def is_lost(value: Any) -> bool:
    """Whether JAX would change an integer of a NumPy array of 64-bit numbers, or make a float an infinity."""
    return _first_lost(np.asarray(value)) is not None


def _check(value: Any, what: str | Callable[[], str], within: tuple[int, ...] = ()) -> None:
    """Refuse a number of 64 bits, or warn of it, if one is lost; `within` is the position of the value in lists."""
    lost = ((), value, 0) if isinstance(value, int) else _first_lost(np.asarray(value))
    if lost is not None:
        position, number, others = lost
        _refuse_or_warn(value, what if isinstance(what, str) else what(), ((*within, *position), number, others))


def _first_lost(array: np.ndarray[Any, Any]) -> _Lost | None:
    if not array.size:
        return None
    limits = _OF_INTEGERS.get(array.dtype.kind)
    if limits is not None:
        if array.min() >= limits.min and array.max() <= limits.max:
            return None
        is_lost = (array < limits.min) | (array > limits.max)
    else:
        narrow = np.float32 if array.dtype.kind == "f" else np.complex64
        try:
            with np.errstate(over="raise"):
                array.astype(narrow)
        except FloatingPointError:
            pass
        else:
            return None
        with np.errstate(over="ignore"):
            is_lost = np.isfinite(array) & ~np.isfinite(array.astype(narrow))
    position = tuple(map(int, np.argwhere(is_lost)[0]))
    return position, array[position], int(is_lost.sum()) - 1


def _refuse_or_warn(value: Any, what: str, lost: _Lost) -> None:
    position, number, others = lost
    where = f"{f' at {position}' if position else ''}{f', and {others} more' if others else ''}"
    if isinstance(value, int):
        raise _of_integer(value, what, where)
    limits = _OF_INTEGERS.get(value.dtype.kind)
    if limits is not None:
        raise NumberRangeError(
            f"{what}: expected integers from {limits.min} to {limits.max}, since JAX keeps 32 bits of NumPy's "
            f"{value.dtype}, got {number}{where}",
            f"{_WIDER}\n  convert them to numbers of a smaller dtype, for instance (ids % rows).astype(numpy.int32)",
        )
    largest = np.finfo(np.float32).max
    text = f"{what}: {value.dtype} {number}{where} is beyond float32, whose largest is {largest:.8g}, and becomes inf"
    loc = caller()
    remedy = "scale the numbers, or set jax.config.update('jax_enable_x64', True)"
    warn_at(loc, f"{text}{at(loc)}\n  {remedy}", NumberRangeWarning)


def _of_integer(value: int, what: str, where: str) -> NumberRangeError:
    return NumberRangeError(
        f"{what}: expected integers from {_OF_PYTHON.min} to {_OF_PYTHON.max}, since JAX keeps 32 bits of Python's "
        f"int, got {value}{where}",
        f"{_WIDER}\n  give a smaller number, such as id % rows, or a float, float(number)",
    )
