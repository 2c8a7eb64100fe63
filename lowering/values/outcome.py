"""How some work ended: with its value, or with the error that ended it."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

Value = TypeVar("Value")

#: What a callback gets when the work has ended; `isinstance(outcome, BaseException)` tells which of the two it is.
Outcome: TypeAlias = Value | BaseException
