"""The primitive that makes a dense array of rows.

The gradient of a table that a function only looks rows up in is a result of this primitive. To every program, JAX's
transformations included, it is an ordinary dense array. `keep_rows` finds it again in a traced program, and leaves the
dense array out where rows are enough.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from dflow.tracing.errors import VariableError
from dflow.tracing.ir.wide_sums import summed_at
from dflow.tracing.jax_frontend import Equation, Jaxpr, NoteEffect, inner_parts
from dflow.tracing.source import Loc, at, caller

#: A dense gradient is reported when it has this many bytes or more, and more than this many times those of its rows.
LARGE_BYTES = 1 << 24
LARGE_RATIO = 4


#: The variables whose size in memory is limited, by name.
_limited: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

#: Set once this process has bound `rows_to_dense_p`: before that no program needs to be searched for it.
is_bound = threading.Event()


class DenseGradientWarning(UserWarning):
    """The gradient of a large table is made dense although few rows were looked up; the message names the op."""


def rows_to_dense(indices: Any, rows: Any, shape: Sequence[int], table: str, *, once: bool = False) -> jax.Array:
    """A dense array of `shape`: at `indices` the rows, elsewhere zero.

    indices  i32[k]; rows of one index add up, and a row past the end is left out
    rows     [k, *shape[1:]]
    table    what it is the gradient of, for messages
    once     whether no two of the indices are of one row
    """
    is_bound.set()
    dense: jax.Array = rows_to_dense_p.bind(indices, rows, shape=tuple(shape), table=table, once=once)
    return dense


def note_limited(table: Any) -> None:
    """Note whether the size of a new variable in memory is limited: then a dense gradient of it is an error."""
    _limited.pop(table.name, None)  # an earlier namesake
    if table.max_memory is not None:
        _limited[table.name] = table


def warn_of_dense(table: str, dense: Any, rows: Any, user: str, loc: Loc | None) -> None:
    """Warn with DenseGradientWarning if a gradient is large and its rows are few.

    Raises VariableError if the variable has a limit of its size in memory.

    dense, rows  types of the dense form and of the rows
    user, loc    the op that uses the dense form, and its line
    """
    if table in _limited:
        raise VariableError(
            f"the gradient of {table!r}, which has max_memory: expected its rows, got an array of {dense.shape} for "
            f"{user}{at(loc)}",
            "use an optimizer that leaves rows without a gradient alone (SGD, Adagrad), or "
            "dflow.Optimizer(..., lazy_rows=True), in a function of dflow.jit",
        )
    size_bytes, rows_bytes = (math.prod(part.shape) * part.dtype.itemsize for part in (dense, rows))
    if size_bytes < LARGE_BYTES or size_bytes < LARGE_RATIO * rows_bytes:
        return
    shown = f"{size_bytes / 1e6:.0f} MB" if size_bytes >= 1e6 else f"{size_bytes} bytes"
    dims = ",".join(map(str, dense.shape))
    warnings.warn(
        f"the gradient of {table!r}, {dense.dtype}[{dims}], has {rows.shape[0]} rows and is made dense, {shown}, "
        f"for {user}{at(loc)}\n"
        "  keep it in a function of dflow.jit, and use an optimizer that leaves rows without a gradient alone (SGD,\n"
        "  Adagrad) or dflow.Optimizer(..., lazy_rows=True); for the rows themselves write dflow.grad(..., rows=True)",
        DenseGradientWarning,
        stacklevel=2,
    )


def _dense(indices: Any, rows: Any, *, shape: tuple[int, ...], table: str, once: bool) -> Any:
    if once:
        return jnp.zeros(shape, rows.dtype).at[indices].add(rows, mode="drop")
    return summed_at(indices, rows, shape[0])


_compiled = jax.jit(_dense, static_argnames=("shape", "table", "once"))


def _dense_now(indices: Any, rows: Any, *, shape: tuple[int, ...], table: str, once: bool) -> Any:
    warn_of_dense(table, jax.ShapeDtypeStruct(shape, rows.dtype), rows, "a gradient outside of traced code", caller())
    return _compiled(indices, rows, shape=shape, table="", once=once)


def dense_to_rows(dense: Any) -> tuple[jax.Array, jax.Array]:
    """The inverse of `rows_to_dense`: indices and rows of the array.

    In a compiled program these are the rows that a gradient was made from, elsewhere all rows. So the compiled program
    may have fewer rows than the trace.
    """
    indices, rows = dense_to_rows_p.bind(dense)
    return indices, rows


def note_gradients(gradients: Sequence[Any]) -> None:
    """Mark arrays in a trace, for `keep_rows.noted_rows` to tell which of them are made of rows."""
    note_p.bind(*gradients)


def times_noted(jaxpr: Jaxpr) -> int:
    """Return how often a program marks gradients: a `while` loop counts twice, a `cond` as its longest branch."""
    return sum(map(_times_noted_by, jaxpr.eqns))


def _times_noted_by(equation: Equation) -> int:
    name = equation.primitive.name
    if name == note_p.name:
        return 1
    inner = [times_noted(part) for part, _ in inner_parts(equation.params)]
    if name == "cond":
        return max(inner, default=0)
    iterations: int = equation.params["length"] if name == "scan" else 2 if name == "while" else 1
    return iterations * sum(inner)


def _all_rows(dense: Any) -> list[Any]:
    return [jnp.arange(dense.shape[0], dtype=jnp.int32), dense]


def _all_row_types(dense: Any) -> list[Any]:
    return [jax.core.ShapedArray(dense.shape[:1], jnp.int32), dense]


dense_to_rows_p = jex.Primitive("dense_to_rows")
dense_to_rows_p.multiple_results = True
dense_to_rows_p.def_impl(_all_rows)
dense_to_rows_p.def_abstract_eval(_all_row_types)
mlir.register_lowering(dense_to_rows_p, mlir.lower_fun(_all_rows, multiple_results=True))

note_p = jex.Primitive("note_gradients")
note_p.multiple_results = True
note_p.def_effectful_abstract_eval(lambda *gradients: ([], {NoteEffect()}))

rows_to_dense_p = jex.Primitive("rows_to_dense")
rows_to_dense_p.def_impl(_dense_now)
rows_to_dense_p.def_abstract_eval(lambda indices, rows, *, shape, **_: jax.core.ShapedArray(shape, rows.dtype))
mlir.register_lowering(rows_to_dense_p, mlir.lower_fun(_dense, multiple_results=False))


def _transpose(cotangent: Any, indices: Any, rows: Any, **_: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None, ad.Zero(rows.aval)]
    return [None, jnp.asarray(cotangent).at[indices].get(mode="fill", fill_value=0)]


def _batched(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    return jax.vmap(lambda indices, rows: _dense(indices, rows, **params), in_axes=tuple(dims))(*args), 0


ad.defjvp(rows_to_dense_p, None, lambda tangent, indices, _, **params: rows_to_dense_p.bind(indices, tangent, **params))
ad.primitive_transposes[rows_to_dense_p] = _transpose
batching.primitive_batchers[rows_to_dense_p] = _batched
