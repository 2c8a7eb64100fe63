"""Every class of message, gathered from the files of `messages/`."""

from __future__ import annotations

import functools
import importlib
import operator
import pkgutil
from typing import Any

from dflow.distributed.wire import messages
from dflow.distributed.wire.messages.message import Marked, Message, Notice, Request

_BASES = {Message, Request, Notice, Marked}
_FILES = [
    importlib.import_module(f"{messages.__name__}.{file.name}") for file in pkgutil.iter_modules(messages.__path__)
]

#: Every message that is sent.
MESSAGES: tuple[type[Message], ...] = tuple(
    found
    for file in _FILES
    for found in vars(file).values()
    if isinstance(found, type) and issubclass(found, Message) and found.__module__ == file.__name__
    if found not in _BASES
)

#: Their union, for a decoder.
ANY_MESSAGE: Any = functools.reduce(operator.or_, MESSAGES)
