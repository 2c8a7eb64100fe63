"""Reads of some rows of a task's variables, also by a process that is no member, such as a server of models."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.basic import ArrayInfo
from dflow.distributed.wire.messages.message import Message, Request
from dflow.tracing.rows.id_rows import IdRows


class RowRead(msgspec.Struct, frozen=True):
    """Rows of the variable `name`, which must have this type, such as `f32[5,3]`.

    `id_rows`  for a shard of a table with a vocabulary: how the ids that it is asked for have rows; None if it is asked
               for numbers of rows
    """

    name: str
    type: str
    id_rows: IdRows | None = None


class RowsRead(Message, frozen=True):
    """The rows of each read, in the payload.

    `returns`  number of returns of all tasks to a snapshot before the rows were read
    """

    arrays: tuple[ArrayInfo, ...]
    returns: int = 0


class ReadRows(Request[RowsRead], frozen=True):
    """Read rows, all between the same two steps of the task.

    The payload has an array for each read: numbers of rows, or ids, u32[n, 2]. A number past an end reads the row at
    that end. An id without a row reads the row that its bucket shares, and is given no row.
    """

    is_open = True

    reads: tuple[RowRead, ...]
    arrays: tuple[ArrayInfo, ...]
