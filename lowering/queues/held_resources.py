"""The creation of queues and accumulators that a process holds, for itself or for peers."""

from __future__ import annotations

from dflow.lowering.queues.accumulators import HeldAccumulator
from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.values.wide_types import admit
from dflow.tracing.errors import InternalError
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings
from dflow.tracing.ir.queue_settings import QueueSettings
from dflow.tracing.ir.types import AccumulatorType, HostType, QueueType


def make_resource(
    name: str, type: HostType, settings: QueueSettings | AccumulatorSettings
) -> HeldQueue | HeldAccumulator:
    """Return a new, empty queue or accumulator; `name` is for messages."""
    admit(array.dtype for array in type.arrays)
    match type, settings:
        case QueueType(), QueueSettings():
            return HeldQueue(name, settings, type)
        case AccumulatorType(), AccumulatorSettings():
            return HeldAccumulator(name, settings, type)
    raise InternalError(f"{name!r}: expected settings of a {type}, got {settings}")
