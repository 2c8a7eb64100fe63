"""Remedies for the differences between saved arrays and variables: similar names, and shapes that are transposed."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence

from dflow.tracing.errors import CheckpointError
from dflow.tracing.ir.types import ArrayType

#: Orders of dimensions that are tried before all others: they convert kernels of convolutions over images, and of
#: convolutions over time, from PyTorch's layout to JAX's.
_FIRST_ORDERS = ((2, 3, 1, 0), (2, 1, 0))
#: Most names that are compared letter by letter.
_FEW = 200
#: What makes a name similar; a name with an array of the same sizes, in any order, is more similar by `_SAME_SIZES`.
_LEAST, _SAME_SIZES = 0.6, 0.3


def orders_of(
    transpose: Mapping[str, Sequence[int]], variables: Mapping[str, str], types: Mapping[str, ArrayType]
) -> dict[str, tuple[int, ...]]:
    """Return the order of the stored dimensions of each array that is transposed, by the array's name.

    transpose  orders by a regular expression for the whole name of a variable
    variables  the names of the variables by their arrays' names
    types      those of the saved arrays

    Raises CheckpointError for an expression that no variable's name matches, and for an order of other dimensions.
    """
    found: dict[str, tuple[int, ...]] = {}
    for pattern, order in transpose.items():
        try:
            matching = [array for array, name in variables.items() if re.fullmatch(pattern, name)]
        except re.error as error:
            raise CheckpointError(f"transpose: {pattern!r} is no regular expression: {error}", "correct it") from None
        if not matching:
            raise CheckpointError(
                f"transpose: expected expressions for names of the variables, got {pattern!r}, which none matches",
                f"the variables are {', '.join(sorted(variables.values())[:_FEW])}",
            )
        for array in matching:
            if array in types and sorted(order) != [*range(len(types[array].shape))]:
                raise CheckpointError(
                    f"transpose: {pattern!r}: expected an order of the {len(types[array].shape)} dimensions of "
                    f"{array!r}, got {tuple(order)}",
                    "give it as to numpy.transpose, such as (1, 0)",
                )
        found |= {array: tuple(order) for array in matching if array in types}
    return found


def order_between(saved: Sequence[int], held: Sequence[int]) -> tuple[int, ...] | None:
    """Return an order that gives an array of one shape the other shape; None if there is none."""
    if len(saved) != len(held) or sorted(saved) != sorted(held) or tuple(saved) == tuple(held):
        return None
    orders = (*_FIRST_ORDERS, tuple(reversed(range(len(saved)))), *itertools.permutations(range(len(saved))))
    return next(order for order in orders if len(order) == len(saved) and [saved[axis] for axis in order] == [*held])


def nearest(name: str, type: str, others: Mapping[str, str]) -> str | None:
    """Return the name most similar to one, also by the sizes of the arrays; None if none is similar."""

    def similarity(other: str) -> float:
        return _alike(name, other, few=len(others) <= _FEW) + _SAME_SIZES * (_sizes(others[other]) == _sizes(type))

    best = max(others, key=similarity, default=None)
    return best if best is not None and similarity(best) >= _LEAST else None


def _sizes(type: str) -> list[str]:
    """Return the sizes of a type such as `f32[3,2]`, in an order of their own."""
    return sorted(type.partition("[")[2].split(" ")[0].rstrip("]").split(","))


def _alike(name: str, other: str, *, few: bool) -> float:
    if few:
        return difflib.SequenceMatcher(None, name, other).ratio()
    one, two = ({*re.split(r"[/._:]", each)} for each in (name, other))
    return 2 * len(one & two) / (len(one) + len(two))
