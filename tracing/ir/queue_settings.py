"""Settings of a queue: its kind, its capacity, and the order of its elements."""

from __future__ import annotations

from enum import Enum

import msgspec

#: Default longest wait on a queue, in s.
DEFAULT_TIMEOUT_S = 600.0


class QueueKind(Enum):
    """The order of dequeued elements."""

    FIFO = "fifo"
    SHUFFLE = "shuffle"
    PRIORITY = "priority"


class QueueSettings(msgspec.Struct, frozen=True, tag="queue"):
    """Settings of a queue, whose contents depend on nothing but these and its events.

    `capacity`           largest number of elements
    `min_after_dequeue`  number of elements it holds back to shuffle the next with, until it is closed
    `seed`               of the shuffling, from 0 to 2**64 - 1
    """

    kind: QueueKind
    capacity: int
    min_after_dequeue: int = 0
    seed: int = 0
