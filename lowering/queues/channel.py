"""The executor's interface for sending and receiving values, whatever the transport.

An edge carries values at most once per step, and within loops once per iteration. Then the iteration numbers are
appended to the edge, those of the outermost loop first, as in `w@3` or `w@3.0`. A channel matches a send with its
receive by `(step, edge)`, with these numbers; either may come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy.typing as npt

from dflow.lowering.values.outcome import Outcome

if TYPE_CHECKING:
    # Tools that read events start in half the time without JAX.
    import jax

    from dflow.lowering.values.payload_layout import PayloadLayout

#: Limit of steps in one life of a task. Each life's first step number is a multiple of it, greater than any before.
STEPS_OF_A_LIFE = 1 << 27


class StepId(msgspec.Struct, frozen=True, gc=False):
    """One run of a graph: the task that started it, and the number of the step on that task."""

    origin: str
    number: int

    @property
    def index(self) -> int:
        """The index of the step within the task's current life, from 0."""
        return self.number % STEPS_OF_A_LIFE


#: Separates an edge from the iteration numbers; no edge outside of loops has it.
ITERATION = "@"
#: A transferred value. Small values from the network are NumPy arrays, which programs take without conversion.
Sent: TypeAlias = "jax.Array | npt.NDArray[Any]"
#: Called with the values that a send of a bundle gave, in order, or with the error that ended the wait.
Deliver: TypeAlias = "Callable[[Outcome[Sequence[Sent]]], None]"


class NotConnected(Exception):
    """Raised by `Channel.send` if the destination must be connected first. Send again once that is done.

    `then`  connects on another thread, and calls its argument once, from any thread: with None, or with the error
    """

    def __init__(self, then: Callable[[Callable[[Exception | None], None]], None]) -> None:
        super().__init__()
        self.then = then


class Channel(NamedTuple):
    """The transport as the executor uses it for Send and Recv.

    send     hands values of an edge of a step over for a task. After the return the caller may free them. Raises
             NotConnected, when nothing was sent, since to connect takes long if the destination is dead.
    receive  has its last argument called once, from any thread, with the values of an edge of a step from a task, which
             have the types of the layout, or with an error
    """

    send: Callable[[StepId, str, str, Sequence[Sent]], None]
    receive: Callable[[StepId, str, str, PayloadLayout, Deliver], None]


def frame_of_turn(frame: str, turn: int) -> str:
    """Return the suffix of edges in an iteration of a loop; `frame` is the suffix outside of that loop, or ""."""
    return f"{frame}.{turn}" if frame else f"{ITERATION}{turn}"


def edge_alone(edge: str) -> str:
    """Return the edge without the iteration numbers."""
    return edge.partition(ITERATION)[0]
