"""Reads of rows outside of steps. They change nothing, so that training goes on as without them.

Why no step: a step has an identity, takes part in pauses, and a dead or slow process could hold it up. A read is one
message and its answer, and its sender is no member of the cluster. On a CPU the rows are copied from the memory of the
variables, between two programs that write them; nothing is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from dflow.distributed.task.arrivals import Handled, RequestArrival, RequestTable
from dflow.distributed.task.row_read_messages import ReadRows, RowRead, RowsRead
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.transport.link import Limits
from dflow.distributed.wire.codec import decode_arrays, encode_arrays
from dflow.lowering.state.store import MOST_LOOKS, has_view
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.kept_shardings import beside
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import TaskLost, VariableError, WireError
from dflow.tracing.ir.updates import looked_up
from dflow.tracing.rows.id_rows import IdRows

Result = TypeVar("Result")
#: Most memory that one message may ask for, in bytes.
MOST_BYTES = Limits.max_payload_bytes
#: Least number of rows that a program for values outside of the CPU's memory is compiled for.
_LEAST_ROWS = 64


class RowReads(TaskPart):
    """Answers reads of rows; thread-safe."""

    requests: ClassVar[RequestTable[RowReads]] = RequestTable()

    def __init__(self, task: TaskServer) -> None:
        self._name, self._store = short_task_name(task.name), task.store
        self._returns = 0

    @requests.queued(ReadRows)
    def read(self, message: ReadRows, arrival: RequestArrival) -> Handled:
        """Return the rows. Raises TaskLost for a variable that is not here, VariableError for one of another type."""
        asked = decode_arrays(message.arrays, arrival.payload)
        if len(asked) != len(message.reads):
            raise WireError(f"{len(asked)} arrays came for {len(message.reads)} reads of rows")
        size_bytes = sum(self._checked(read, array) for read, array in zip(message.reads, asked, strict=True))
        if size_bytes > MOST_BYTES:
            raise WireError(f"reads of rows: expected at most {MOST_BYTES} bytes, got {size_bytes}")
        keys = [*dict.fromkeys(name for read in message.reads for name in _variables(read))]

        def rows(values: Sequence[jax.Array]) -> list[npt.NDArray[Any]]:
            held = dict(zip(keys, values, strict=True))
            return [_rows(held, read, array) for read, array in zip(message.reads, asked, strict=True)]

        returns = self._returns  # before the rows: later ones may be newer, and never older
        infos, data = encode_arrays(self._when_computed(keys, rows))
        return RowsRead(infos, returns), data

    def return_to(self, copy: Iterable[Any], epoch: int) -> None:
        """See `TaskPart`."""
        self._returns = epoch

    def _checked(self, read: RowRead, asked: npt.NDArray[Any]) -> int:
        """Check a read; return the memory that it needs, in bytes."""
        if missing := [name for name in _variables(read) if name not in self._store]:
            raise TaskLost(
                f"{self._name} does not hold {missing[0]!r} now", "ask again when it has been made or restored"
            )
        held = self._store.type(read.name)
        if str(held) != read.type:
            raise VariableError(
                f"variable {read.name!r}: expected {read.type}, got {held} at {self._name}",
                "export again from this job",
            )
        is_right = asked.dtype == np.uint32 and asked.shape[1:] == (2,) if read.id_rows else asked.ndim == 1
        if not is_right or not np.issubdtype(asked.dtype, np.integer) or not held.shape:
            raise WireError(f"rows of {read.name!r} were asked for by {asked.dtype.name}{[*asked.shape]}")
        row_bytes: int = math.prod(held.shape[1:]) * held.dtype.itemsize
        return len(asked) * (row_bytes + (self._bucket_bytes(read.id_rows, held.shape[0]) if read.id_rows else 0))

    def _bucket_bytes(self, found: IdRows, row_count: int) -> int:
        """Check how ids have rows in a shard of `row_count` rows; return the memory to look at a bucket, in bytes."""
        own, rows = found.settings[2], (row_count,)
        if found.buckets < 1 or not 0 < own < row_count:
            raise WireError(
                f"{self._name}: expected at least 1 bucket, of 1 to {row_count - 1} ids, got {found.buckets} of {own}"
            )
        for name, shape in zip(found.variables, ((row_count, 2), rows, None, rows), strict=False):
            held = self._store.type(name).shape
            if held != (shape or held[:1]):
                raise WireError(f"variable {name!r} beside {row_count} rows: expected {shape or '(n,)'}, got {held}")
        return own * 8 * (2 + len(found.variables))

    def _when_computed(self, keys: Sequence[str], do: Callable[[Sequence[jax.Array]], Result]) -> Result:
        """Return `do(values)`, called while no step writes them; waits for their computation outside of that."""

        def attempt(values: Sequence[Any]) -> tuple[list[Result], list[Any]]:
            is_computed = all(value.is_ready() for value in values)
            return ([do(values)], []) if is_computed else ([], [*values])

        for _ in range(MOST_LOOKS):
            found, values = self._store.look(keys, attempt)
            if found:
                return found[0]
            with suppress(RuntimeError):  # a program has overwritten a value since
                wait_until_computed(values)
        return self._store.look(keys, do)


def _variables(read: RowRead) -> tuple[str, ...]:
    """Return the names of the variables that a read uses."""
    return (read.name, *(() if read.id_rows is None else read.id_rows.variables))


def _rows(held: Mapping[str, jax.Array], read: RowRead, asked: npt.NDArray[Any]) -> npt.NDArray[Any]:
    numbers = asked
    if read.id_rows is not None:
        numbers = read.id_rows.find(asked, lambda name, places: rows_at(held[name], places))
    return rows_at(held[read.name], numbers)


def rows_at(value: jax.Array, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the rows of a value; of a number past an end, the row at that end."""
    inside = numbers.clip(0, value.shape[0] - 1)
    if has_view(value):
        rows: npt.NDArray[Any] = np.asarray(value)[inside]
        return rows
    flat = inside.reshape(-1).astype(np.int32)
    room = max(_LEAST_ROWS, 1 << (len(flat) - 1).bit_length()) if len(flat) else _LEAST_ROWS
    padded = np.zeros(room, np.int32)
    padded[: len(flat)] = flat
    found = np.asarray(looked_up(value, beside(padded, value)))
    return found[: len(flat)].reshape(*inside.shape, *value.shape[1:])
