"""Does each row of a function's outputs depend on the same row of its inputs alone, in a batch of any size?

Why: batching puts rows of several requests into one call, and pads it. That is right only for such functions, and no
program says so: one that subtracts a batch's mean has the same types. So the function is run on a few rows, which are
then replaced by several values, reordered and called fewer at a time. This is a test, not a proof: a function may
depend on other rows for some values only.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from dflow.serving.request_batches import OF_TASKS
from dflow.serving.signature_tensors import SignatureTensors
from dflow.tracing.errors import InputError

#: Rows of the test.
ROWS = 4
#: Largest difference between calls of two sizes, relative to the largest value: XLA rounds each size in its own way.
_TOLERANCE = 0.05
#: Number of values that replace the other rows, by turns; a dtype with fewer repeats them.
_FILLS = 7


def dependence_of_rows(tensors: SignatureTensors, fn: Any, rows: int = ROWS) -> str | None:
    """Return how rows were found to depend on each other, or None. `rows` is at least 2. Raises `OF_TASKS`."""
    random = np.random.default_rng(0)
    base = tensors.example(lambda dtype, shape: _drawn(random, dtype, shape), {str(tensors.batch): rows})
    try:
        expected = tensors.call(fn, base)
    except InputError as error:
        return f"ids of 0 and 1 are refused: {str(error).partition(chr(10))[0]}"
    for row, fill in itertools.product(range(rows), range(_FILLS)):
        others = {name: _others_replaced(array, row, fill) for name, array in base.items()}
        try:
            replaced = tensors.call(fn, others)
        except InputError:
            continue  # a request with ids that no row has is refused alone
        except OF_TASKS:
            raise
        except Exception as error:
            return (
                f"row {row} fails with some values of the other rows of the batch: {str(error).partition(chr(10))[0]}"
            )
        for spec, before, after in zip(tensors.outputs, expected, replaced, strict=True):
            if not np.array_equal(_wide(before[row]), _wide(after[row]), equal_nan=True):
                return f"row {row} of {spec.name} changes with the other rows of the batch"
    backwards = tensors.call(fn, {name: array[::-1].copy() for name, array in base.items()})
    fewer = tensors.call(fn, {name: array[:1].copy() for name, array in base.items()})
    for spec, before, turned, one in zip(tensors.outputs, expected, backwards, fewer, strict=True):
        if not _near(before, turned[::-1]):
            return f"a row of {spec.name} changes with its position in the batch"
        if not _near(before[:1], one):
            return f"a row of {spec.name} changes with the size of the batch"
    return None


def _drawn(random: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if dtype.kind in "biuO":
        drawn = random.integers(0, 2, shape)
        return drawn.astype(str if dtype.kind == "O" else dtype).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _others_replaced(array: np.ndarray[Any, Any], row: int, fill: int) -> np.ndarray[Any, Any]:
    """Return the array with other values in all rows but one; `fill` is the index of the values."""
    replaced = array.copy()
    others = np.arange(len(array)) != row
    values = _fills(array.dtype)
    value = values[fill % len(values)]
    replaced[others] = 1 - array[others].astype(np.int8) if value is None else value
    return replaced


@cache
def _fills(dtype: np.dtype[Any]) -> list[Any]:
    """Return the values for the other rows; None takes the drawn 0 for 1 and 1 for 0."""
    if dtype.kind == "b":
        return [None, False, True]
    if dtype.kind == "O":
        return ["", "0", "1", "a", "100", "\0", "user"]
    if dtype.kind in "iu":
        whole = np.iinfo(dtype)
        # Not the extremes: an integer may be a number of iterations.
        return [None, 0, 1, 3, 100, max(whole.min, -100), min(whole.max, 100_000)]
    real = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return [np.nan, 0, 1e-3, 100, -100, real.min, real.max]


def _near(a: Any, b: Any) -> bool:
    a, b = _wide(a), _wide(b)
    finite = a[np.isfinite(a)]
    scale = float(np.abs(finite).max()) if finite.size else 0.0
    return bool(np.allclose(a, b, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True))


def _wide(array: Any) -> Any:
    return np.asarray(array).astype(np.float64)
