"""Every class of message, gathered from the files of this folder."""

from __future__ import annotations

import functools
import operator
from typing import Any

from dflow.distributed.wire.messages import (
    arrays,
    barriers,
    checkpoints,
    claims,
    connection,
    elections,
    observing,
    placement,
    plans,
    resources,
    roster,
    rounds,
    status,
    transfers,
    variables,
)
from dflow.distributed.wire.messages.message import Message

_FILES = (
    arrays,
    barriers,
    checkpoints,
    claims,
    connection,
    elections,
    observing,
    placement,
    plans,
    resources,
    roster,
    rounds,
    status,
    transfers,
    variables,
)

#: Every message that is sent.
MESSAGES: tuple[type[Message], ...] = tuple(
    found
    for file in _FILES
    for found in vars(file).values()
    if isinstance(found, type) and issubclass(found, Message) and found.__module__ == file.__name__
)

#: Their union, for a decoder.
ANY_MESSAGE: Any = functools.reduce(operator.or_, MESSAGES)
