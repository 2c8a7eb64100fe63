"""The value of one variable: whether the store or a step holds it, and whether arrays outside alias its buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from dflow.tracing.errors import VariableError
from dflow.tracing.ir.types import ArrayType

#: The `place` of a variable that a step only reads.
READ = -1


class Owner(Protocol):
    """A step that may hold values; see `step_state.StepState`."""

    name: str
    #: The values of the variables that it writes; None while the store holds them.
    written: Sequence[Any] | None
    #: The results of the call being dispatched, empty until C code adds them; None while no call is dispatched.
    given: list[Any] | None
    #: Monotonic time until which a thread is known to wait for the values.
    wanted: float

    def is_mine(self) -> bool:
        """Whether this thread dispatches the step's current call."""
        ...

    def readable(self) -> Sequence[Any] | None:
        """Return the values of the variables that it writes; None when they are unknown until a call has ended."""
        ...

    def put_back(self) -> None:
        """Return the values to the store."""
        ...


@dataclass(slots=True, eq=False)
class HeldValue:
    """A variable's value, held here or by the step `at`."""

    value: jax.Array
    type: ArrayType
    #: Whether an array outside the store aliases the buffer, which must then be copied before it is donated.
    lent: bool = False
    #: The step that may hold the value now, and the index of the value in its `written`, or READ.
    at: Owner | None = None
    place: int = READ
    #: Monotonic time until which a thread is known to wait for the variable.
    wanted: float = 0.0


def owner_of(held: HeldValue) -> Owner | None:
    """Return the step that holds the value; None when the store does."""
    owner = held.at
    return None if owner is None or owner.written is None else owner


def taken_from(held: HeldValue) -> jax.Array:
    """Return the value for a program that overwrites its buffer: a copy, if the buffer is aliased."""
    if held.lent:
        held.value, held.lent = jnp.copy(held.value), False
    return held.value


def shown(key: str) -> str:
    """Return a variable's name without the suffix that makes its key unique."""
    return key.partition("#")[0]


def within_the_step() -> VariableError:
    """Error for re-entrancy: a callback or signal handler touched a variable of the step that it interrupted."""
    return VariableError(
        "a variable is asked for within the very step that uses it, by a callback or a handler of a signal",
        "pass the callback what it is to see; have the handler set a flag, and look at the flag between steps",
    )


def lost_value(key: str) -> VariableError:
    """Error for the use of a variable whose buffer was donated to a step that failed."""
    return VariableError(
        f"the value of variable {shown(key)!r} was lost, since a step that writes it failed as it ran",
        "assign it a new value, such as the one that was saved last",
    )
