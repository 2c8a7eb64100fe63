"""Messages of workers to tasks that read batches for them."""

from __future__ import annotations

from dflow.distributed.wire.messages.basic import ArrayInfo
from dflow.distributed.wire.messages.message import Message, Request


class ServedBatch(Message, frozen=True):
    """A batch, whose arrays are in the payload; `form` is its structure, empty after the last batch."""

    form: str
    arrays: tuple[ArrayInfo, ...] = ()


class GetBatch(Request[ServedBatch], frozen=True):
    """Ask a task for batch `number` of the data that it serves under `name`."""

    name: str
    number: int


class BatchCount(Message, frozen=True):
    """The number of batches that a task serves, None without end."""

    count: int | None


class CountBatches(Request[BatchCount], frozen=True):
    """Ask a task for the number of batches that it serves under `name`."""

    name: str
