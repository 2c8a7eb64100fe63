"""The table of the variables of one process. Steps acquire values there and commit new ones.

A step owns the variables that its program writes while it is dispatched, so several steps may run concurrently and none
sees a variable half written. Between its calls the step keeps the values. A user of one of these variables first has
the step release them, and waits while the step is being dispatched.

Steps share the values that they only read. Calls of steps that write nothing take no lock: an array never changes, so
each sees the values of one moment. A step that overwrites a value first takes it away from the steps that read it. It
waits for their calls, since JAX may deadlock when one program donates a buffer while another is dispatched with it.
After `PATIENCE_S` it overwrites a copy instead.

Invariants: the lock is held briefly, never while waiting or while user code runs. A signal handler on the thread that
is in a critical section must not enter another one: it gets an error. After an interrupt each variable has its value
from before or after the step (`uninterrupted.py`).

Why interrupts are not deferred instead: to block SIGINT for this thread defers nothing, since one of JAX's threads
takes the signal and Python still raises here; and to exchange the handler twice takes longer than a call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar
from weakref import ref

import jax

from dflow.lowering.state.held_value import HeldValue, StepState, within_the_step
from dflow.lowering.state.uninterrupted import call_into
from dflow.lowering.values.variable_key import shown
from dflow.tracing.errors import DeadlineExceeded, DflowError, VariableError
from dflow.tracing.ir.row_marks import SUFFIX

Found = TypeVar("Found")

#: A waiting thread checks again after at most this time, in s: an interrupt may keep a step from notifying it.
LOOK_S = 1.0

#: Longest wait for a variable while the step that holds its value is being dispatched, in s.
STEP_S = 600.0

#: A step yields to waiting threads for at most this time before its next call, in s: they may wait for that call.
PATIENCE_S = 0.05

#: A thread that other threads overtake for this time has them yield, in s: twice the time after which Python may switch
#: threads. To hand over every call would wake a thread for each.
FAIR_S = 0.01

#: Longest wait of a finalizer for the lock, in s: the thread that holds the lock may wait for the finalizer.
FINALIZER_S = 1.0


class VariableTable:
    """The values of variables, by key. Every method may be called from any thread.

    Methods that say "in a critical section" are called within `section`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.entries: dict[str, HeldValue] = {}
        #: Whether there are marks of changed rows.
        self.has_marks = False
        #: Whether a thread is in a critical section. The lock alone would admit a signal handler on that thread.
        self._is_inside = False
        #: Notified when a step was dispatched, for waiting threads, and when a wait has ended, for steps that yield.
        self._changed = threading.Condition(self.lock)
        #: Keys of values to free when no step is being dispatched with them.
        self._dropped: deque[str] = deque()
        #: Error, reason and remedy of each value that was freed by `forget`.
        self._gone: dict[str, tuple[type[DflowError], str, str]] = {}

    def runner(self, writes: Collection[str]) -> Callable[..., Any]:
        """Return the method that runs a step that writes these variables."""
        return self.run if writes else self.run_reading

    def run(self, step: StepState, call: Callable[..., Any], args: Iterable[Any]) -> Any:
        """Return the second result of `call(written, read, *args)`; commit the first, the list of the new values."""
        results: list[Any] = []
        thread = get_ident()
        try:
            with self.lock:
                # As a rule it has its values from its last call, and then calls without a critical section.
                while step.results is not None or step.written is None or step.wanted or self._is_inside:
                    self.section(partial(self._acquire, step))
                step.thread, step.results = thread, results
            call_into(results, call, (step.written, step.read, *args))
        finally:
            # Without the lock: until `results` is None again, other threads change neither it nor `written`.
            if step.results is results:
                if results:
                    step.written = results[0][0]
                step.results = None
                if step.wanted or step.callers or not results:
                    self._ended(step, has_failed=not results)
        return results[0][1]

    def run_reading(self, step: StepState, call: Callable[..., Any], args: Iterable[Any]) -> Any:
        """As `run`, for a step that writes nothing. Calls by several threads do not wait for each other."""
        mark = object()
        while True:
            try:
                # First the mark, then the values: `_released` takes the values away first, then looks for marks.
                step.calls[mark] = get_ident()
                values = step.read
                if values is not None and not step.wanted:
                    return call([], values, *args)[1]
            finally:
                if mark in step.calls:  # no call until it is gone
                    del step.calls[mark]
                if step.wanted:
                    self._ended(step, has_failed=False)
            self.section(partial(self._acquire, step))

    def values_of(self, step: StepState) -> tuple[list[Any], list[Any]]:
        """Return the values that the next call of the step takes, to trace it; that call may delete them."""

        def values() -> tuple[list[Any], list[Any]]:
            self._acquire(step)
            return list(step.written or ()), list(step.read or ())

        return self.section(values)

    def _acquire(self, step: StepState) -> None:
        """Prepare a call, in a critical section: yield to waiting threads, wait for other calls, take the values."""
        keys, began, patient_until = (*step.writes, *step.reads), 0.0, time.monotonic() + PATIENCE_S
        while (now := time.monotonic()) < patient_until and (
            step.wanted > now or (step.written is None and self._are_wanted(keys, now))
        ):
            self._pause(self._changed, patient_until - now)
        step.wanted = 0.0  # until a thread that waits sets it again
        while step.results is not None or step.written is None:
            if step.results is None:
                entries = self._released(step.writes, step.reads)
                if self.has_marks:
                    self._check_marked(step)
                _check_intact(keys, [entry.value for entry in entries])
                step.take(entries)
                continue
            if step.is_mine():
                raise VariableError(
                    f"{step.name} is called within a call of it, by a callback or a handler of a signal",
                    "call another function, or have the handler set a flag and look at it between steps",
                )
            now = time.monotonic()
            began = began or now  # of the wait
            left = began + STEP_S - now
            if now - began >= FAIR_S:
                step.wanted = now + LOOK_S
            if left <= 0:
                raise DeadlineExceeded(
                    f"{step.name} has been in a call on another thread for {STEP_S:g} s",
                    "does a callback of that call wait for this thread?",
                )
            step.ended = step.ended or threading.Condition(self.lock)
            step.callers += 1
            try:
                if step.results is not None:  # the call may have ended before it could see that a thread waits
                    self._pause(step.ended, min(left, LOOK_S))
            finally:
                step.callers -= 1
        if began:
            step.wanted = 0.0
            self._changed.notify_all()  # threads that yielded

    def _check_marked(self, step: StepState) -> None:
        """Raise VariableError if a step changes a variable and not the marks of its changed rows."""
        for key in step.writes:
            if key + SUFFIX in self.entries and key + SUFFIX not in step.writes:
                raise VariableError(
                    f"{step.name} writes variable {shown(key)!r} and does not mark the rows that it changes",
                    "make the table with track_changes=True in every process that uses it",
                )

    def _ended(self, step: StepState, *, has_failed: bool) -> None:
        """Notify waiting threads. Abort a failed step: values that it deleted go to the table, which reports them."""
        with self.lock:
            is_lost = has_failed and step.results is None and any(value.is_deleted() for value in step.written or ())
            if is_lost and not self._is_inside:
                step.release()
            if step.ended is not None:
                step.ended.notify_all()  # if only one were to wake, two threads could keep out a third
            self._changed.notify_all()

    def section(self, do: Callable[[], Found]) -> Found:
        """Return `do()`, run as a critical section. Raises VariableError inside another one of this thread."""
        with self.lock:
            self.sweep()
            if self._is_inside:
                raise VariableError(
                    "a handler of a signal uses variables while the thread it came to is about to use some",
                    "have the handler set a flag, and look at the flag between steps",
                )
            self._is_inside = True
            try:
                found = do()
            finally:
                self._is_inside = False
        # Not `return` inside the `with`: an interrupt right after the call would leave the lock acquired.
        return found

    def _pause(self, condition: threading.Condition, seconds: float) -> None:
        """Wait for a condition of the lock, in a critical section. Other threads may enter meanwhile."""
        self._is_inside = False
        try:
            condition.wait(seconds)
        finally:
            self._is_inside = True

    def drop(self, key: str) -> None:
        """Free a value, if there is one. A finalizer may call this on any thread."""
        self._dropped.append(key)
        if self.lock.acquire(timeout=FINALIZER_S):
            try:
                self.sweep()
            finally:
                self.lock.release()

    def sweep(self) -> None:
        """Free the dropped values, except those of steps being dispatched. The lock is held."""
        if self._is_inside:
            return
        kept: list[str] = []
        while self._dropped:
            try:
                key = self._dropped.popleft()
            except IndexError:  # a finalizer that ran meanwhile took it
                break
            users = _users([entry]) if (entry := self.entries.get(key)) is not None else set()
            if any(user.results is not None for user in users):
                kept.append(key)
                continue
            for user in users:
                user.release()
            self._remove(key)
            self._gone.pop(key, None)
        self._dropped.extend(kept)

    def forget(self, key: str, reason: str, remedy: str, error: type[DflowError] = VariableError) -> None:
        """Free a value that may still be used: a later use raises `error` with this reason and remedy."""

        def forget() -> None:
            if key in self.entries:
                self._released([key])
                self._remove(key)
                self._gone[key] = error, reason, remedy

        self.section(forget)

    def _remove(self, key: str) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None and entry.memory is not None:
            entry.memory.unpaged.pop(key, None)

    def replace(self, values: Mapping[str, jax.Array], check: Callable[[str, HeldValue, Any], None]) -> None:
        """Replace all of these values in one moment, or none if `check` raises for one."""

        def replace() -> None:
            found = self._released(values)
            for entry, (key, value) in zip(found, values.items(), strict=True):
                check(key, entry, value)
            new = {
                key: HeldValue(value, entry.type, memory=entry.memory)
                for entry, (key, value) in zip(found, values.items(), strict=True)
            }
            self.entries.update(new)

        self.section(replace)

    def values(self, keys: Collection[str]) -> list[jax.Array]:
        """Return the values at one moment, from the table or from steps, in a critical section.

        Raises VariableError for a key that does not exist or a value that was lost, DeadlineExceeded when a step holds
        one of the values for longer than `STEP_S`.
        """
        values: list[jax.Array] = []

        def look(entries: Sequence[HeldValue]) -> StepState | None:
            holders = [entry.holder for entry in entries]
            # One call of `readable` for each step: between two, the step might end.
            written = {holder: holder.readable() for holder in dict.fromkeys(holders) if holder is not None}
            for entry, holder in zip(entries, holders, strict=True):
                if holder is None:
                    values.append(entry.value)
                elif (in_step := written[holder]) is not None:
                    values.append(in_step[entry.index])
                else:
                    values.clear()
                    return holder
            return None

        self._when_free(keys, look)
        _check_intact(keys, values)
        return values

    def _released(self, keys: Collection[str], read: Sequence[str] = ()) -> list[HeldValue]:
        """Return the entries of `keys` and `read`, with their values returned to the table, in a critical section.

        Then no other step has a value of `keys`, and calls that only read them have been dispatched, except for calls
        that take longer than `PATIENCE_S`, or are interrupted by the caller. The variables of these calls are marked as
        aliased. Raises like `values`, but not for a value that was lost.
        """
        until = time.monotonic() + PATIENCE_S

        def look(entries: Sequence[HeldValue]) -> StepState | None:
            written, only_read = entries[: len(keys)], entries[len(keys) :]
            users = _users(written).union(holder for entry in only_read if (holder := entry.holder) is not None)
            busy = next((user for user in users if user.results is not None), None)
            if busy is not None:
                if busy.is_mine():
                    raise within_the_step()
                return busy
            for user in users:
                user.release()
            reading = [user for user in users if user.calls]
            if reading and time.monotonic() < until and not any(user.is_mine() for user in reading):
                return reading[0]
            for user in reading:
                self._alias(user)
            return None

        return self._when_free([*keys, *read], look)

    def _alias(self, step: StepState) -> None:
        """Mark what calls of the step read as aliased, in a critical section. Then no thread waits for these calls."""
        for entry in map(self.entries.get, step.reads):
            if entry is not None:
                entry.is_aliased = True
        step.calls.clear()

    def _when_free(
        self, keys: Collection[str], look: Callable[[Sequence[HeldValue]], StepState | None]
    ) -> list[HeldValue]:
        """Return the entries of `keys` once `look(entries)` returns None, in a critical section.

        It returns a step being dispatched to wait for. The wait marks the step and the variables, so that steps yield.
        """
        seen: set[StepState] = set()
        marked: list[StepState | HeldValue] = []
        until = 0.0
        try:
            while True:
                entries = [self.entry(key) for key in keys]
                busy = look(entries)
                if busy is None:
                    return entries
                now = time.monotonic()
                until = until or now + STEP_S
                marked = [busy, *entries]
                for one in marked:
                    one.wanted = now + LOOK_S
                if busy in seen and until <= now:
                    name = next(key for key in keys if key in (*busy.writes, *busy.reads))
                    raise DeadlineExceeded(
                        f"variable {shown(name)!r} is asked for, but a call of {busy.name}, which has it, has not "
                        f"ended within {STEP_S:g} s",
                        "does a callback of that call wait for this thread?",
                    )
                if busy in seen:
                    self._pause(self._changed, min(until - now, PATIENCE_S if busy.calls else LOOK_S))
                seen.add(busy)  # it may have ended before it was marked, so the first time there is no wait
        finally:
            for one in marked:
                one.wanted = 0.0
            if marked:
                self._changed.notify_all()  # other waiting threads mark their variables again

    def buffer(self, key: str) -> jax.Array:
        """Return the array of the value, which a call being dispatched may delete: use only its sharding.

        Raises VariableError.
        """
        with self.lock:  # another step may take the variable, which changes both the holder and the index
            entry = self.entry(key)
            holder = entry.holder
            written = None if holder is None else holder.written
            return entry.value if written is None else written[entry.index]

    def is_busy(self, keys: Iterable[str]) -> bool:
        """Whether a thread is dispatching a program that uses one of these variables."""
        users = _users([entry for entry in map(self.entries.get, keys) if entry is not None])
        return any(user.results is not None or user.calls for user in users)

    def _are_wanted(self, keys: Iterable[str], now: float) -> bool:
        return any(entry is not None and entry.wanted > now for entry in map(self.entries.get, keys))

    def entry(self, key: str) -> HeldValue:
        """Return the entry of a variable. Raises VariableError when there is none."""
        entry = self.entries.get(key)
        if entry is None and key in self._gone:
            error, reason, remedy = self._gone[key]
            raise error(reason, remedy)
        if entry is None:
            there = sorted(map(shown, self.entries)) or "none"
            raise VariableError(f"no variable {shown(key)!r} is held here; there are {there}")
        return entry


def _users(entries: Sequence[HeldValue]) -> set[StepState]:
    """Return the steps that may have the value of one of these variables."""
    readers: set[ref[StepState]] = set()
    readers.update(*(entry.readers for entry in entries))
    users = {*(reader() for reader in readers), *(entry.holder for entry in entries)}
    return {user for user in users if user is not None}


def _check_intact(keys: Iterable[str], values: Iterable[jax.Array]) -> None:
    """Raise VariableError if a buffer was donated to a step that failed."""
    for key, value in zip(keys, values, strict=True):
        if value.is_deleted():
            raise VariableError(
                f"the value of variable {shown(key)!r} was lost, since a step that writes it failed as it ran",
                "assign it a new value, such as the last one saved",
            )
