"""Queues and accumulators on a task."""

from __future__ import annotations

from dflow.distributed.wire.messages.basic import ArrayInfo, Arrays, Ok
from dflow.distributed.wire.messages.message import Message, Request
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings
from dflow.tracing.ir.queue_settings import QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp


class CreateResource(Request[Ok], frozen=True):
    """Create a queue or an accumulator unless it exists.

    `handle` is its type, as graphs print it: `queue<f32[2], i32[]>`. Every creation must repeat type and settings. For
    `process` see `CreateVariable`. Snapshots have its contents if it `is_saved`.
    """

    name: str
    handle: str
    settings: QueueSettings | AccumulatorSettings
    process: str = ""
    is_saved: bool = True


class CallResource(Request[Arrays], frozen=True):
    """Run one op on a queue or an accumulator, which may wait; answered by `Arrays` when the op has ended.

    The op is the task's part of a step that `origin` numbered for it alone. So its wait ends when that step is
    cancelled by `CancelStep`, or when `origin` leaves. The payload holds the operands.
    """

    speaker = "origin"

    key: str
    op: ResourceOp
    origin: str
    step: int
    operands: tuple[ArrayInfo, ...] = ()


class Fed(Message, frozen=True):
    """The numbers of the elements of a feed that were put into a queue, as pairs of a first and a stop."""

    ranges: tuple[tuple[int, int], ...]


class GetFed(Request[Fed], frozen=True):
    """Ask a queue for the numbers of the elements that the feed `feed` has put in; answered by `Fed`.

    `forget`  whether the queue also drops these numbers: the feed has ended, and no later one continues it
    """

    key: str
    feed: str
    forget: bool = False


class FailQueue(Request[Ok], frozen=True):
    """Close a queue because its feed failed.

    `failure` is the class, the text and the line of the error, `fed` the line where the queue is fed.
    """

    key: str
    failure: str
    fed: str
