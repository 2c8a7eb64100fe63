"""Arrays in a payload."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.message import Message


class ArrayInfo(msgspec.Struct, frozen=True):
    """Dtype and shape of one array in a payload, which holds its arrays one after the other."""

    dtype: str
    shape: tuple[int, ...]


class Arrays(Message, frozen=True):
    """Arrays, one after the other in the payload."""

    arrays: tuple[ArrayInfo, ...]
