"""The variables of one compiled step while it has their values: before, during and after each call of it.

Invariant: where a value is can be told at every line, for an interrupt or a handler of a signal may come at any: it is
in the step that has it `at`, from when that step has `written` until it has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import get_ident
from typing import Any, Protocol

import jax

from dflow.lowering.held_value import READ, HeldValue, taken_from, within_the_step
from dflow.lowering.program import Program
from dflow.lowering.turns import LOOK_S, STEP_S, Found, Turns
from dflow.tracing.errors import DeadlineExceeded, VariableError
from dflow.tracing.jax_frontend import passes_handles
from dflow.tracing.source import at, caller

#: How long a step gives way to others before its next call, in s: bounded, for it may be what they wait for.
PATIENCE_S = 0.05


class Values(Protocol):
    """What is needed of the store that has the values otherwise."""

    turns: Turns

    def alone(self, do: Callable[[], Found]) -> Found:
        """Do something in a turn at the store."""
        ...

    def claim_values(self, keys: Collection[str]) -> list[HeldValue]:
        """What is held under `keys`, with the values there, in a turn at the store."""
        ...

    def are_wanted(self, keys: Iterable[str], now: float) -> bool:
        """Whether someone waits for one of these variables."""
        ...


class StepState:
    """The variables of one compiled step, whose values stay with it from call to call.

    They stay as the very lists that its program takes and gives, so that a call costs nothing for each variable. It
    does not keep the program, which may be gone before another step asks for the values.

    `given` is there while a call is dispatched, on the thread `thread`: C code puts the results into it, so that they
    are found whenever an interrupt comes. Until then `written` has the values from before, which are gone once the
    program has overwritten them, unless it `keeps` them.
    """

    __slots__ = (
        "_callers",
        "_ended",
        "_gives_tree",
        "_store",
        "_turns",
        "given",
        "held",
        "keeps",
        "name",
        "read",
        "reads",
        "thread",
        "wanted",
        "writes",
        "written",
    )

    def __init__(self, store: Values, writes: Sequence[str], reads: Sequence[str], name: str, keeps: bool) -> None:
        self._store, self._turns, self.name, self.keeps = store, store.turns, name, keeps
        self.writes, self.reads = tuple(writes), tuple(reads)
        self.held: tuple[list[HeldValue], list[HeldValue]] = [], []
        #: The values, while they are here.
        self.written: Sequence[Any] | None = None
        self.read: list[Any] = []
        self.given: list[Any] | None = None
        self.thread = 0
        #: Until when it is known that someone waits for the values, and how many wait to call the step.
        self.wanted, self._callers = 0.0, 0
        self._ended: threading.Condition | None = None
        self._gives_tree = False

    @passes_handles
    def run(self, call: Callable[..., Any], constants: Any, args: Sequence[Any]) -> Any:
        """The result of `call(written, read, constants, *args)`, which gives the new values and the result."""
        given: list[Any] = []
        try:
            self._begin(given, gives_tree=True)
            given.extend(map(call, (self.written,), (self.read,), (constants,), *zip(args)))
        finally:
            # Without a call up to where `given` is gone, for an interrupt comes at calls.
            if self.given is given:
                if given:
                    self.written = given[0][0]
                self.given = None
                if self.wanted or self._callers or not given:
                    self._after(given)
        return given[0][1]

    def run_program(self, program: Program, operands: Sequence[Any]) -> Sequence[jax.Array]:
        """The results of a program, other than the new values."""
        given: list[Any] = []
        count = len(self.writes)
        try:
            self._begin(given, gives_tree=False)
            program.run_into(given, [*(self.written or ()), *self.read, *operands])
        finally:
            # As above.
            if self.given is given:
                if given:
                    self.written = given[0][:count]
                self.given = None
                if self.wanted or self._callers or not given:
                    self._after(given)
        results: Sequence[jax.Array] = given[0][count:]
        return results

    def _begin(self, given: list[Any], *, gives_tree: bool) -> None:
        """Have the values, and be dispatched from here on: the results go into `given`."""
        turns, thread = self._turns, get_ident()
        with turns.lock:
            while self.given is not None or self.written is None or self.wanted or turns.is_inside:
                self._store.alone(self._prepare)
            self._gives_tree, self.thread, self.given = gives_tree, thread, given

    def values(self) -> tuple[list[Any], list[Any]]:
        """The values written and the values read, to know their types and places by."""

        def values() -> tuple[list[Any], list[Any]]:
            self._prepare()
            return list(self.written or ()), list(self.read)

        return self._store.alone(values)

    def is_mine(self) -> bool:
        """Whether the call that is dispatched is on this thread: who asks is a callback of it, or comes by a signal."""
        return self.thread == get_ident()

    def readable(self) -> Sequence[Any] | None:
        """The written variables' values, in a turn at the store; None when only the end of a call will tell.

        Raises VariableError when that is a call on this very thread.
        """
        given, written = self.given, self.written
        if given is None or written is None:
            return written
        is_mine = self.is_mine()
        if not (is_mine or self.keeps):
            return None
        if given:
            renewed: Sequence[Any] = given[0][0] if self._gives_tree else given[0]
            return renewed
        if any(value.is_deleted() for value in written):
            if is_mine:
                raise within_the_step()
            return None
        return written

    def put_back(self) -> None:
        """Give the store its values again, in a turn at it."""
        written, read = self.held
        for held, value in zip(written, self.written or (), strict=True):
            held.value, held.lent = value, False
        self.written = None  # from here on the values are the store's
        for held in (*written, *read):
            if held.at is self:
                held.at = None
        self.held, self.read = ([], []), []

    def _prepare(self) -> None:
        """Before a call, in a turn at the store: give way, wait for calls on other threads, and have the values."""
        store, turns, until, now = self._store, self._turns, 0.0, time.monotonic()
        if self.wanted > now or (self.written is None and store.are_wanted((*self.writes, *self.reads), now)):
            turns.pause(turns.changed, PATIENCE_S)
        self.wanted = 0.0  # until they say so again
        while self.given is not None or self.written is None:
            if self.given is None:
                self._take()
                continue
            if self.is_mine():
                raise VariableError(
                    f"{self.name} is called within a call of it, by a callback or a handler of a signal{at(caller())}\n"
                    "  call another function, or have the handler set a flag and look at it between steps"
                )
            until = until or time.monotonic() + STEP_S
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self.name} has been in a call on another thread for {STEP_S:g} s{at(caller())}\n"
                    "  does a callback of that call wait for this thread?"
                )
            self._ended = self._ended or threading.Condition(turns.lock)
            self._callers += 1
            try:
                turns.pause(self._ended, min(left, LOOK_S))
            finally:
                self._callers -= 1

    def _take(self) -> None:
        """Take the values from the store, those written as its own."""
        found = self._store.claim_values((*self.writes, *self.reads))
        written, read = found[: len(self.writes)], found[len(self.writes) :]
        values, self.read = [taken_from(held) for held in written], [held.value for held in read]
        for place, held in enumerate(written):
            held.place, held.at = place, self
        for held in read:
            held.place, held.at = READ, self
        self.held = written, read
        self.written = values  # from here on the values are its own

    def _after(self, given: list[Any]) -> None:
        """Tell those who wait, and let the store say of values that a failed call took along that they are lost."""
        turns = self._turns
        with turns.lock:
            is_lost = not given and self.given is None and any(value.is_deleted() for value in self.written or ())
            if is_lost and not turns.is_inside:
                self.put_back()
            if self._ended is not None:
                self._ended.notify()
            turns.changed.notify_all()
