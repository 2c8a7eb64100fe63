"""How the executor sends and receives, without knowing over what.

An edge carries at most one value in a step, and within loops one in each turn: then the turns stand behind the edge,
those of the outermost loop first, as `w@3` or `w@3.0`. Whoever implements `Channel` matches a send with its receive by
`(step, edge)`, these included; either may come first.
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


def frame_of_turn(frame: str, turn: int) -> str:
    """What stands behind the edges in a turn of a loop that is itself in `frame`, which is empty outside of loops."""
    return f"{frame}.{turn}" if frame else f"@{turn}"


def edge_alone(edge: str) -> str:
    """The edge without the turns."""
    return edge.partition("@")[0]


def is_in_loop(edge: str) -> bool:
    """Whether turns stand behind the edge."""
    return "@" in edge
