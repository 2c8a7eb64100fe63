"""An op on a queue or an accumulator as data: the same for an eager call, a plan and a message."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from dflow.tracing.ir.queue_settings import DEFAULT_TIMEOUT_S


class FedElement(NamedTuple):
    """Identity of an element of a feed: the name of the feed, and the number of the element, from 0."""

    feed: str
    number: int


class ResourceOp(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """The op `name` of `ops.RESOURCE_OPS` with its attributes; `line` is the user's line, which ends messages.

    An enqueue of the element `of` a feed is done once, also when it is sent again because its answer was lost. The
    memory of operands that are `owned` never changes, so the resource may retain them without a copy. A `giver` gives
    an accumulator one gradient for each step. The task that runs the op decides these two.
    """

    name: str
    count: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    cancel_pending: bool = False
    line: str = ""
    owned: bool = False
    of: FedElement | None = None
    giver: str = ""
