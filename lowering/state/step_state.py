"""The variables of one compiled step while the step holds their values: before, during and after each call of it.

Invariant: a value's holder is known at every line, since an interrupt or a signal handler may come at any line. The
holder is the step in `HeldValue.at` while that step's `written` is not None, and the store otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import get_ident
from typing import Any, Protocol

from dflow.lowering.state.store_lock import LOOK_S, STEP_S, Found, StoreLock
from dflow.lowering.values.held_value import READ, HeldValue, taken_from, within_the_step
from dflow.tracing.errors import DeadlineExceeded, VariableError
from dflow.tracing.jax_frontend import passes_handles
from dflow.tracing.source import at, caller

#: A step yields to waiting threads for at most this time before its next call, in s: they may wait for that call.
PATIENCE_S = 0.05


class Values(Protocol):
    """What a step needs of the store that holds the values between steps."""

    turns: StoreLock

    def alone(self, do: Callable[[], Found]) -> Found:
        """Return `do()`, run in a critical section of the store."""
        ...

    def claim_values(self, keys: Collection[str]) -> list[HeldValue]:
        """Return the entries of `keys`, with their values in the store. Called in a critical section."""
        ...

    def are_wanted(self, keys: Iterable[str], now: float) -> bool:
        """Whether a thread waits for one of these variables; `now` is the monotonic time."""
        ...


class StepState:
    """The variables of one compiled step, whose values stay with it from call to call.

    `constants` are passed to the program after the values that it only reads, in one list.

    The values stay in the lists that the program takes and returns, so a call has no cost per variable. The step does
    not keep the program, which may be freed before another step needs the values.

    `given` is a list while a call is being dispatched, by the thread `thread`. C code adds the results to it, so they
    are not lost when an interrupt comes. Until then `written` has the values from before the call, which the program
    deletes by overwriting them, unless `keeps` is true.
    """

    __slots__ = (
        "_callers",
        "_constants",
        "_ended",
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

    def __init__(
        self,
        store: Values,
        writes: Sequence[str],
        reads: Sequence[str],
        name: str,
        keeps: bool = False,
        constants: Sequence[Any] = (),
    ) -> None:
        self._store, self._turns, self.name, self.keeps = store, store.turns, name, keeps
        self._constants = constants
        self.writes, self.reads = tuple(writes), tuple(reads)
        self.held: tuple[list[HeldValue], list[HeldValue]] = [], []
        #: The values, while the step holds them.
        self.written: Sequence[Any] | None = None
        self.read: list[Any] = []
        self.given: list[Any] | None = None
        self.thread = 0
        #: Monotonic time until which a thread is known to wait for the values; number of threads waiting to call.
        self.wanted, self._callers = 0.0, 0
        self._ended: threading.Condition | None = None

    @passes_handles
    def run(self, call: Callable[..., Any], args: Iterable[Any]) -> Any:
        """Return the second result of `call(written, read, *args)`; the first is the list of the new values."""
        given: list[Any] = []
        try:
            self._begin(given)
            given.extend(map(call, (self.written,), (self.read,), *zip(args)))
        finally:
            # No function call until `given` is None: Python handles interrupts at calls.
            if self.given is given:
                if given:
                    self.written = given[0][0]
                self.given = None
                if self.wanted or self._callers or not given:
                    self._after(given)
        return given[0][1]

    def _begin(self, given: list[Any]) -> None:
        """Take the values and mark the step as dispatched by this thread; its results go into `given`."""
        turns, thread = self._turns, get_ident()
        with turns.lock:
            while self.given is not None or self.written is None or self.wanted or turns.is_inside:
                self._store.alone(self._prepare)
            self.thread, self.given = thread, given

    def values(self) -> tuple[list[Any], list[Any]]:
        """Return the values written and the values read, with the constants, for their types and shardings."""

        def values() -> tuple[list[Any], list[Any]]:
            self._prepare()
            return list(self.written or ()), list(self.read)

        return self._store.alone(values)

    def is_mine(self) -> bool:
        """Whether this thread dispatches the current call, so that the caller is its callback or a signal handler."""
        return self.thread == get_ident()

    def readable(self) -> Sequence[Any] | None:
        """Return the values of the variables that it writes; None when they are unknown until a call has ended.

        Called in a critical section. Raises VariableError when this thread dispatches that call.
        """
        given, written = self.given, self.written
        if given is None or written is None:
            return written
        is_mine = self.is_mine()
        if not (is_mine or self.keeps):
            return None
        if given:
            renewed: Sequence[Any] = given[0][0]
            return renewed
        if any(value.is_deleted() for value in written):
            if is_mine:
                raise within_the_step()
            return None
        return written

    def put_back(self) -> None:
        """Return the values to the store. Called in a critical section."""
        written, read = self.held
        for held, value in zip(written, self.written or (), strict=True):
            held.value, held.lent = value, False
        self.written = None  # from here on the store holds the values
        for held in (*written, *read):
            if held.at is self:
                held.at = None
        self.held, self.read = ([], []), []

    def _prepare(self) -> None:
        """Prepare a call, in a critical section: yield to waiting threads, wait for other calls, take the values."""
        store, turns, until, now = self._store, self._turns, 0.0, time.monotonic()
        if self.wanted > now or (self.written is None and store.are_wanted((*self.writes, *self.reads), now)):
            turns.pause(turns.changed, PATIENCE_S)
        self.wanted = 0.0  # until a thread that waits sets it again
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
        """Take the values from the store, with copies of aliased buffers that the step will overwrite."""
        found = self._store.claim_values((*self.writes, *self.reads))
        written, read = found[: len(self.writes)], found[len(self.writes) :]
        values = [taken_from(held) for held in written]
        self.read = [*(held.value for held in read), *self._constants]
        for place, held in enumerate(written):
            held.place, held.at = place, self
        for held in read:
            held.place, held.at = READ, self
        self.held = written, read
        self.written = values  # from here on the step holds the values

    def _after(self, given: list[Any]) -> None:
        """Notify waiting threads. Return values deleted by a failed call to the store, which reports them as lost."""
        turns = self._turns
        with turns.lock:
            is_lost = not given and self.given is None and any(value.is_deleted() for value in self.written or ())
            if is_lost and not turns.is_inside:
                self.put_back()
            if self._ended is not None:
                self._ended.notify()
            turns.changed.notify_all()
