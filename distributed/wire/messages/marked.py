"""Marks of the coordinator's state on its answers; see `coordinator.state_marks`."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.message import Message


class Mark(msgspec.Struct, frozen=True):
    """A point in the history of the coordinator's state; see `state_marks`."""

    start: str = ""
    revision: int = 0


class Marked(Message, frozen=True, kw_only=True):
    """Base of answers and notifications that carry the mark of the newest write of the coordinator's state."""

    mark: Mark = Mark()
