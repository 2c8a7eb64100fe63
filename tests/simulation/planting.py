"""What a planted fault is, and the kinds of changes that several of them make."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.programs import STEPS

#: Makes the planted attribute of the original one.
Made = Callable[[Any], Any]


@dataclass(frozen=True)
class Mutation:
    """`attribute` of `owner` replaced by `made(what it was)`; `found_by` is the invariant that fails then.

    `faults` are those of the schedules that shall find it, drawn from their seeds when None; `program` is what the
    workers do in them.
    """

    says: str
    owner: Any
    attribute: str
    made: Made
    found_by: str
    faults: str | None = None
    program: str = STEPS


def giving(result: Any) -> Made:
    """Return a function that returns `result`, whatever its arguments."""
    return lambda original: lambda *args, **kwargs: result


def change_is_new(original: Any) -> Any:
    """Return `StepAttempt._begins` that takes each change of a step's state for a new one."""

    def begins(attempt: Any, keys: Any, one: Any) -> Any:
        attempt._applied.pending[attempt._step.number, one] = deque()
        return True, None

    return begins


def doing_nothing(original: Any) -> Any:
    """Return a function that decides on nothing."""
    return lambda *args, **kwargs: []
