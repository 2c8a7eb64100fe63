"""The marks of a variable's changed rows: the period of each row's last change.

The marks of a variable of n rows are another variable, i32[n + 2], on the same device. Its last elements are the
present period, which each question for changed rows ends, and the number of the marks' life. A store draws a new life,
with all rows marked, when it creates marks and when it replaces the variable or the marks, as a restore does: periods
of another life say nothing.

Invariant: a program that changes rows also marks them, after the change. So a row that was read in a later period than
that of its mark is up to date.
"""

from __future__ import annotations

import secrets
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.tracing.ir.types import ArrayType

#: The end of the name, and of the key, of a variable's marks.
SUFFIX = "/~changes"
#: Numbers of elements from the end: the present period, and the life.
PERIOD, LIFE = -2, -1
#: Number of elements beside those of rows.
_OTHERS = 2


def marks_type(rows: int) -> ArrayType:
    """The type of the marks of a variable with this number of rows."""
    return ArrayType(np.dtype(np.int32), (rows + _OTHERS,))


def fresh_marks(type: ArrayType) -> npt.NDArray[np.int32]:
    """Marks of a new life: all rows have changed in it."""
    marks = np.ones(type.shape, np.int32)
    marks[LIFE] = secrets.randbits(31)
    return marks


def marked(marks: Any, *indices: Any) -> Any:
    """The marks after a change of the rows at `indices`, or of all rows without them.

    Indices have the meaning that they have in an update: negative ones count from the end, others may be past an end.
    Of indices that are no i32, more rows may be marked.
    """
    rows = marks.shape[0] - _OTHERS
    if not indices:
        return jnp.where(jnp.arange(marks.shape[0]) < rows, marks[PERIOD], marks)
    positions = indices[0].reshape(-1).astype(jnp.int32)
    positions = jnp.where(positions < 0, positions + rows, positions)
    is_row = (positions >= 0) & (positions < rows)
    return marks.at[jnp.where(is_row, positions, marks.shape[0])].set(marks[PERIOD], mode="drop")
