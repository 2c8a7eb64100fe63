"""The value of one variable: where it is, and whether it has been handed out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from dflow.tracing.errors import VariableError
from dflow.tracing.source import at, caller
from dflow.tracing.types import ArrayType

#: The place of a variable that a step only reads.
READ = -1


class Owner(Protocol):
    """A step that may have values; see `step_state.StepState`."""

    name: str
    #: The values written, while they are here.
    written: Sequence[Any] | None
    #: What the call that is dispatched has given so far; None while none is.
    given: list[Any] | None
    #: Until when it is known that someone waits for the values.
    wanted: float

    def is_mine(self) -> bool:
        """Whether the call that is dispatched is on this thread."""
        ...

    def readable(self) -> Sequence[Any] | None:
        """The written variables' values; None when only the end of a call will tell."""
        ...

    def put_back(self) -> None:
        """Give the store its values again."""
        ...


@dataclass(slots=True, eq=False)
class HeldValue:
    """A variable's value, here or in the step that has it."""

    value: jax.Array
    type: ArrayType
    lent: bool = False
    #: The step that may have the value now, and at which place of what it writes.
    at: Owner | None = None
    place: int = READ
    #: Until when it is known that someone waits for the step, by the monotonic clock.
    wanted: float = 0.0


def owner_of(held: HeldValue) -> Owner | None:
    """The step that has the value."""
    owner = held.at
    return None if owner is None or owner.written is None else owner


def taken_from(held: HeldValue) -> jax.Array:
    """The value for who will overwrite it: a copy, where it has been handed out."""
    if held.lent:
        held.value, held.lent = jnp.copy(held.value), False
    return held.value


def shown(key: str) -> str:
    """The name of a variable, without what tells it apart from others of that name."""
    return key.partition("#")[0]


def within_the_step() -> VariableError:
    """The error for who asks for what the step has that it is in itself."""
    return VariableError(
        f"a variable is asked for within the very step that uses it, by a callback or a handler of a signal"
        f"{at(caller())}\n  pass the callback what it is to see; "
        "have the handler set a flag, and look at the flag between steps"
    )


def lost_value(key: str) -> VariableError:
    """The error for who asks for what a failed step took along."""
    return VariableError(
        f"the value of variable {shown(key)!r} was lost, since a step that writes it failed as it ran{at(caller())}\n"
        "  assign it a new value, such as from what was saved last"
    )
