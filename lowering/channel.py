"""How the executor sends and receives, without knowing over what.

An edge carries at most one value in a step. Whoever implements `Channel` matches a send with its receive by
`(step, edge)`; either may come first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy.typing as npt

#: The steps of one life of a task: a life's first number is a multiple of it, and greater than any before.
STEPS_OF_A_LIFE = 1 << 27


class StepId(NamedTuple):
    """One run of a graph: the task that started it and that task's own count of steps."""

    origin: str
    number: int

    @property
    def place(self) -> int:
        """The step's place among those of the task's present life."""
        return self.number % STEPS_OF_A_LIFE


#: What crosses: of small values that came over the network, a NumPy array, which programs take as it is.
Sent = jax.Array | npt.NDArray[Any]
Deliver = Callable[[Sent | BaseException], None]


class Channel(Protocol):
    """The executor's side of Send and Recv."""

    def send(self, step: StepId, edge: str, destination: str, value: Sent) -> None:
        """Hand `value` over for `destination`; returns once the caller may let go of it."""
        ...

    def receive(self, step: StepId, edge: str, source: str, deliver: Deliver) -> None:
        """Call `deliver` once, from any thread, with the value or with the error that ended the wait."""
        ...
