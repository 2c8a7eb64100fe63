"""The value of one variable, and the values that one step keeps from call to call.

Invariant: a value's holder is known wherever an interrupt or a signal handler may come (`uninterrupted.py`). The
holder is the step in `HeldValue.step` while that step's `written` is not None, and the table otherwise. A step holds
the values that it writes. The values that it only reads are also in the table and with other steps that read them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp

from dflow.lowering.paging.paged_memory import PagedMemory
from dflow.tracing.errors import VariableError
from dflow.tracing.ir.types import ArrayType


class StepState:
    """The variables of one compiled step, whose values may stay with it from call to call.

    writes  keys of the variables that the program writes
    reads   keys of the variables that it only reads
    name    the step's, in messages
    keeps   whether the program overwrites no value

    The values stay in the lists that the program takes and returns, so a call has no cost per variable. The step keeps
    neither the program nor constants of it, which may be freed before another step needs the values.

    `results` is a list while a call is being dispatched, by the thread `thread`; `call_into` adds what the program
    returns. Until then `written` has the values from before the call, which the
    program deletes by overwriting them, unless `keeps` is true.

    A step that writes no variable has no `results`: several threads may be in calls of it, those in `calls`.
    """

    def __init__(self, writes: Sequence[str], reads: Sequence[str], name: str, keeps: bool = False) -> None:
        self.writes, self.reads, self.name, self.keeps = tuple(writes), tuple(reads), name, keeps
        #: The values written and the values read, while the step has them; their entries in the table.
        self.written: Sequence[Any] | None = None
        self.read: list[Any] | None = None
        self.entries: list[HeldValue] = []
        self.results: list[Any] | None = None
        self.thread = 0
        #: Thread of each call in progress of a step that writes nothing, by an object of the call.
        self.calls: dict[object, int] = {}
        #: Monotonic time until which a thread is known to wait for the values; number of threads waiting to call.
        self.wanted, self.callers = 0.0, 0
        #: Notified at the end of a call, for these threads.
        self.ended: threading.Condition | None = None

    def is_mine(self) -> bool:
        """Whether this thread dispatches a current call, so that the caller is its callback or a signal handler."""
        return get_ident() in (self.thread, *self.calls.values())

    def take(self, entries: Sequence[HeldValue]) -> None:
        """Take the values from the table, with copies of aliased buffers that the step will overwrite."""
        count = len(self.writes)
        values = [entry.unaliased() for entry in entries[:count]]
        read, own = [entry.value for entry in entries[count:]], ref(self)
        for entry in entries[count:]:
            if own not in entry.readers:
                entry.readers.add(ref(self, entry.readers.discard))
        for index, entry in enumerate(entries[:count]):
            entry.index, entry.step = index, self
        self.entries = list(entries)
        self.written, self.read = values, read  # from here on the step holds the values

    def release(self) -> None:
        """Return the values to the table."""
        for entry, value in zip(self.entries, self.written or (), strict=False):
            entry.value, entry.is_aliased = value, False
        self.written = self.read = None  # from here on the table holds the values
        for entry in self.entries:
            if entry.step is self:
                entry.step = None
        self.entries = []

    def readable(self) -> Sequence[Any] | None:
        """Return the values of the variables that it writes; None when they are unknown until a call has ended.

        Raises VariableError when this thread dispatches that call.
        """
        results, written = self.results, self.written
        if results is None or written is None:
            return written
        is_mine = self.is_mine()
        if not (is_mine or self.keeps):
            return None
        if results:
            renewed: Sequence[Any] = results[0][0]
            return renewed
        if any(value.is_deleted() for value in written):
            if is_mine:
                raise within_the_step()
            return None
        return written


@dataclass(slots=True, eq=False)
class HeldValue:
    """A variable's value, held here or by `step`."""

    value: jax.Array
    type: ArrayType
    #: Whether an array outside the table aliases the buffer, which must then be copied before it is donated.
    is_aliased: bool = False
    #: The step that may hold the value now, and the index of the value in its `written`.
    step: StepState | None = None
    index: int = 0
    #: The steps that may have the value to read it. A step that is collected removes itself.
    readers: set[ref[StepState]] = field(default_factory=set)
    #: Monotonic time until which a thread is known to wait for the variable.
    wanted: float = 0.0
    #: The limit of the variable's pages in memory, which it shares with others; the value is paged if it is large.
    memory: PagedMemory | None = None

    @property
    def holder(self) -> StepState | None:
        """The step that holds the value; None when the table does."""
        step = self.step
        return None if step is None or step.written is None else step

    @property
    def pages(self) -> PagedMemory | None:
        """The memory of the value's pages; None for a value that is not paged."""
        return self.memory if self.memory is not None and self.memory.takes(self.type) else None

    def unaliased(self) -> jax.Array:
        """Return the value for a program that overwrites its buffer: a copy, if the buffer is aliased."""
        if self.is_aliased:
            copied = jnp.copy(self.value) if self.pages is None else self.pages.copy(self.value)
            self.value, self.is_aliased = copied, False
        return self.value


def within_the_step() -> VariableError:
    """Error for re-entrancy: a callback or signal handler touched a variable of the step that it interrupted."""
    return VariableError(
        "a variable is asked for within the very step that uses it, by a callback or a handler of a signal",
        "pass the callback what it is to see; have the handler set a flag, and look at the flag between steps",
    )
