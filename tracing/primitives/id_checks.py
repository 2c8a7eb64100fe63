"""Checks of row numbers while a program runs: a number that no row has is an error that names it.

The check is an op of the host, before the program that takes the numbers: an error within a compiled program would cost
a copy of the state that the program changes. Inside a loop that XLA runs it is a callback. XLA reports an error of a
callback as an error of XLA, whose text has the number of the check; `raises_failed_checks` raises the check's error
instead. An exported program, which runs without Python, returns what the checks found (`recorded_checks.py`).
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from copy import copy
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from dflow.tracing.context_values import within
from dflow.tracing.errors import InputError
from dflow.tracing.jax_frontend import await_arrays, checked_numbers, unlogged_callback_error
from dflow.tracing.source import at, caller

F = TypeVar("F", bound=Callable[..., Any])

#: The noun for row numbers in messages.
IDS = "ids"
#: Remedy by the noun.
_REMEDIES = {
    IDS: "map the ids to the rows of the table, for instance by ids % rows, or give the table more rows",
    "segments": "give bags= the number of bags, and the numbers of the bags from 0",
}
#: Most failed checks whose errors are kept until they are raised.
_MOST_FAILED = 100


def checked_ids(ids: Any, *, size: int, table: str, noun: str = IDS) -> jax.Array:
    """The ids, integers of any shape. Raises InputError, when they are known, if one is not from 0 to `size` - 1.

    noun  a key of the remedies: what the numbers are
    """
    checked: jax.Array = check_ids_p.bind(ids, size=size, table=table, noun=noun, line=at(caller()))[0]
    return checked


def after_id_check(ids: Any, values: Any, *, size: int, table: str, noun: str = IDS) -> Any:
    """Return a pytree of arrays as it is. Raises as `checked_ids`, before anything that takes these arrays runs."""
    leaves, tree = jax.tree_util.tree_flatten(values)
    _, *after = check_ids_p.bind(ids, *leaves, size=size, table=table, noun=noun, line=at(caller()))
    return jax.tree_util.tree_unflatten(tree, after)


def check_ids(ids: Any, size: int, table: str, line: str = "", noun: str = IDS) -> None:
    """Raise InputError unless all ids are from 0 to `size` - 1; the first that is not is named.

    Of an array over several processes, each process checks its own part.
    """
    for first, part in _parts(ids):
        if not part.size or (part.min() >= 0 and part.max() < size):
            continue
        outside = (part < 0) | (part >= size)
        position = tuple(map(int, np.argwhere(outside)[0]))
        index = tuple(start + index for start, index in zip(first, position, strict=True))
        where = f" at {index}" if index else ""
        more = f", and {outside.sum() - 1} more {noun} outside" if outside.sum() > 1 else ""
        error = InputError(
            f"table {table!r}: expected {noun} from 0 to {size - 1}, got {part[position]}{where}{more}{line}",
            _REMEDIES[noun],
        )
        error.outside = int(part[position])
        raise error


def _parts(ids: Any) -> Iterator[tuple[Sequence[int], np.ndarray[Any, Any]]]:
    """Yield the parts of an array that this process has, each with the indices of its first element."""
    if not isinstance(ids, jax.Array) or ids.is_fully_addressable:
        array = np.asarray(ids)
        yield (0,) * array.ndim, array
        return
    for shard in {str(shard.index): shard for shard in ids.addressable_shards}.values():
        yield [part.start or 0 for part in shard.index], np.asarray(shard.data)


def _checked_now(ids: Any, *values: Any, size: int, table: str, noun: str, line: str) -> Any:
    check_ids(ids, size, table, line, noun)
    return [ids, *values]


def nan_unless(is_row: Any, value: Any) -> jax.Array:
    """The value of each id, or NaN if it is without a row, which only a program without checks comes to.

    While JAX looks for the op that made a NaN, this is none.
    """
    masked: jax.Array = value if checked_numbers() else jnp.where(is_row, value, jnp.nan)
    return masked


def without_id_checks() -> AbstractContextManager[None]:
    """Return a context that lowers programs without the checks."""
    return within(_are_checked, False)


_are_checked: ContextVar[bool] = ContextVar("dflow_id_checks", default=True)


class _CheckFailed(Exception):
    """Raised in a callback for a failed check, by its number."""


_numbers = itertools.count()
#: The errors of failed checks in callbacks, by number.
_failed: OrderedDict[int, InputError] = OrderedDict()
_NUMBER = re.compile(r"dflow: check (\d+) of row numbers failed")


#: Whether a program of this process has a check, so that it may fail after its call has returned.
_in_programs = threading.Event()


def raises_failed_checks(fn: F) -> F:
    """Decorate a function that waits for its programs to raise the error of a check in one in place of XLA's."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            found = failed_check(error)
            if found is None:
                raise
            raise found from None

    return called  # type: ignore[return-value]


def awaits_checks(fn: F) -> F:
    """Like `raises_failed_checks`, for a function that may return before programs of unknown contents have run.

    It waits for its results if any program of this process has a check: JAX may run the program after the call.
    """

    @functools.wraps(fn)
    def awaited(*args: Any, **kwargs: Any) -> Any:
        results = fn(*args, **kwargs)
        if _in_programs.is_set():
            await_arrays(results)
        return results

    return raises_failed_checks(awaited)  # type: ignore[return-value]


def failed_check(error: BaseException) -> InputError | None:
    """Return the error of the check that made a program fail, if one did."""
    number = _NUMBER.search(str(error))
    # A copy: a raised error keeps the frames that it passes, and their arrays.
    return None if number is None else copy(_failed.get(int(number[1])))


def _in_xla(ids: Any, *values: Any, size: int, table: str, noun: str, line: str) -> Any:
    if not _are_checked.get():
        return [ids, *values]

    _in_programs.set()

    def check(ids: Any) -> Any:
        try:
            check_ids(ids, size, table, line, noun)
        except InputError as error:
            number = next(_numbers)
            _failed[number] = error.with_traceback(None)
            if len(_failed) > _MOST_FAILED:
                _failed.popitem(last=False)
            raise _CheckFailed(f"dflow: check {number} of row numbers failed: {error}") from None
        return ids

    # With values the ids themselves may be unused, and XLA would leave a pure call out.
    call = io_callback if values else jax.pure_callback
    return [call(check, jax.ShapeDtypeStruct(ids.shape, ids.dtype), ids), *values]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    # Tangents of integers are no arrays that a check could pass on, and the primals are checked.
    return check_ids_p.bind(*primals, **params), [*tangents]


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    return check_ids_p.bind(*args, **params), dims


unlogged_callback_error(_CheckFailed)

check_ids_p: Any = jex.Primitive("check_ids")
check_ids_p.multiple_results = True
check_ids_p.def_impl(_checked_now)
check_ids_p.def_abstract_eval(lambda *operands, **_: list(operands))
ad.primitive_jvps[check_ids_p] = _jvp
batching.primitive_batchers[check_ids_p] = _batched
mlir.register_lowering(check_ids_p, mlir.lower_fun(_in_xla, multiple_results=True))
