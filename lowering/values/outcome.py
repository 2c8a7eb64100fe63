"""How some work ended: with its value, or with the error that ended it."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

Value = TypeVar("Value")

#: The argument of a callback for the end of some work; `isinstance(outcome, BaseException)` tells an error.
Outcome: TypeAlias = Value | BaseException


def raise_interrupt(error: BaseException) -> None:
    """Raise `error` if it is an interrupt (Ctrl-C), for the thread that runs."""
    if not isinstance(error, Exception):
        raise error
