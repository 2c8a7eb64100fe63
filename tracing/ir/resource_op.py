"""An op on a queue or an accumulator as data: the same for an eager call, a plan and a message."""

from __future__ import annotations

import msgspec

from dflow.tracing.ir.queue_settings import DEFAULT_TIMEOUT_S


class ResourceOp(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """The op `name` of `ops.RESOURCE_OPS` with its attributes; `line` is the user's line, which ends messages.

    The memory of operands that are `owned` never changes, so the resource may retain them without a copy. The task that
    runs the op decides that.
    """

    name: str
    count: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    cancel_pending: bool = False
    line: str = ""
    owned: bool = False
