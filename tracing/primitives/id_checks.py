"""Checks of row numbers while a program runs: a number that no row has is an error that names it.

The check is an op of the host, before the program that takes the numbers: an error within a compiled program would cost
a copy of the state that the program changes. Inside a loop that XLA runs it is a callback. An exported program, which
runs without Python, has no checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from dflow.tracing.errors import InputError


def checked_ids(ids: Any, *, size: int, table: str) -> jax.Array:
    """The ids, integers of any shape. Raises InputError, when they are known, if one is not from 0 to `size` - 1."""
    checked: jax.Array = check_ids_p.bind(ids, size=size, table=table)
    return checked


def check_ids(ids: Any, size: int, table: str, line: str = "") -> None:
    """Raise InputError unless all ids are from 0 to `size` - 1; the first that is not is named."""
    array = np.asarray(ids)
    if not array.size or (array.min() >= 0 and array.max() < size):
        return
    outside = (array < 0) | (array >= size)
    place = tuple(map(int, np.argwhere(outside)[0]))
    more = f", and {outside.sum() - 1} more ids outside" if outside.sum() > 1 else ""
    raise InputError(
        f"table {table!r}: expected ids from 0 to {size - 1}, got {array[place]} at {place}{more}{line}",
        "map the ids to the rows of the table, for instance by ids % rows, or give the table more rows",
    )


def _checked_now(ids: Any, *, size: int, table: str) -> Any:
    check_ids(ids, size, table)
    return ids


@contextmanager
def without_id_checks() -> Iterator[None]:
    """Return a context that lowers programs without the checks."""
    token = _are_checked.set(False)
    try:
        yield
    finally:
        _are_checked.reset(token)


_are_checked: ContextVar[bool] = ContextVar("dflow_id_checks", default=True)


def _in_xla(ids: Any, *, size: int, table: str) -> Any:
    if not _are_checked.get():
        return ids

    def check(ids: Any) -> Any:
        check_ids(ids, size, table)
        return ids

    return jax.pure_callback(check, jax.ShapeDtypeStruct(ids.shape, ids.dtype), ids)


check_ids_p: Any = jex.Primitive("check_ids")
check_ids_p.def_impl(_checked_now)
check_ids_p.def_abstract_eval(lambda ids, **_: ids)
ad.primitive_jvps[check_ids_p] = lambda primals, tangents, **params: (check_ids_p.bind(*primals, **params), tangents[0])
batching.defvectorized(check_ids_p)
mlir.register_lowering(check_ids_p, mlir.lower_fun(_in_xla, multiple_results=False))
