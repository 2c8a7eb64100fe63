"""Values of the current context, which is a thread's or a task's of asyncio, for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Give a context variable this value inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
