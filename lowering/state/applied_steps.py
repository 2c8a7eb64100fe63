"""The steps of shared runs that have changed the state of this process, so that a repeated step changes it only once.

Why: when a worker dies, another one does its claimed steps again, and some parts of them may already be applied on some
tasks. The part of a repeated step runs as usual, but each change of state that an earlier attempt has made is skipped.
So each step is applied exactly once on each task.

A step is identified by its run, its number in the run, and the number of the call in the step (`StepOfRun`), which are
the same in all attempts. A change is identified by its variable or resource, and its number among the step's changes of
that one: the order of these is the order of the program.

Invariants: a change is recorded before it is made, so of two concurrent attempts one makes it; a change that failed is
not recorded. A part that ended without an error is recorded as a whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from dflow.lowering.values.index_set import IndexSet
from dflow.tracing.errors import StepCancelled, StrategyError

LOGGER = logging.getLogger("dflow")

Result = TypeVar("Result")


class StepOfRun(NamedTuple):
    """A call of a function in step `number` of the run `run`; `call` is its number among the calls in the step."""

    run: str
    number: int
    call: int = 0


@dataclass
class _CallRecord:
    """The applied steps of one call of a run.

    `whole`  the steps whose parts have ended here
    `begun`  for each other step, the number of changes made by key
    `is_void` whether the process has returned to an earlier record
    """

    whole: IndexSet = field(default_factory=IndexSet)
    begun: dict[int, dict[str, int]] = field(default_factory=dict)
    is_void: bool = False


class AppliedCall(msgspec.Struct, frozen=True):
    """The record of one call of a run, to be written: the ranges of `_CallRecord.whole`, and `begun`."""

    run: str
    call: int
    whole: tuple[tuple[int, int], ...]
    begun: dict[int, dict[str, int]]


class AppliedSteps:
    """The record of one process; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_call: dict[tuple[str, int], _CallRecord] = {}

    def copy(self) -> tuple[AppliedCall, ...]:
        """Return a copy of the record, made while no step of a run changes state."""
        with self._lock:
            return tuple(
                AppliedCall(
                    *key,
                    tuple((part.start, part.stop) for part in record.whole.ranges()),
                    {number: dict(counts) for number, counts in record.begun.items()},
                )
                for key, record in self._by_call.items()
            )

    def return_to(self, copy: Iterable[AppliedCall]) -> None:
        """Return to a copy of the record. Attempts that have begun change nothing any more: they fail."""
        with self._lock:
            for record in self._by_call.values():
                record.is_void = True
            self._by_call = {
                (one.run, one.call): _CallRecord(IndexSet(range(*pair) for pair in one.whole), dict(one.begun))
                for one in copy
            }

    def attempt(self, step: StepOfRun) -> StepAttempt:
        """Return a new attempt at the part of a step."""
        key = step.run, step.call
        applied = self._by_call.get(key)
        if applied is None:
            with self._lock:
                applied = self._by_call.setdefault(key, _CallRecord())
        return StepAttempt(step, applied, self._lock)


class StepAttempt:
    """One attempt at the part of a step in this process; thread-safe. Made by `AppliedSteps.attempt`."""

    def __init__(self, step: StepOfRun, applied: _CallRecord, lock: threading.Lock) -> None:
        self._step, self._applied, self._lock = step, applied, lock
        #: Number of changes of this attempt by key, made or skipped.
        self._counts: dict[str, int] = {}

    def once(self, keys: Sequence[str], change: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
        """Return `change()`, or `otherwise()` if an earlier attempt has made this change of the state under `keys`.

        raises  StrategyError if an earlier attempt has changed some of `keys` here and not the others; StepCancelled if
                the process has returned to an earlier record since this attempt was made
        """
        if not self.begins(keys):
            return otherwise()
        try:
            return change()
        except BaseException:
            self.failed(keys)
            raise

    def begins(self, keys: Sequence[str]) -> bool:
        """Record the next change of the state under `keys`; return whether it is new. See `once`."""
        with self._lock:
            if self._applied.is_void:
                raise StepCancelled(f"the state that step {self._step.number} uses was restored meanwhile")
            counts = self._counts
            for key in keys:
                counts[key] = counts.get(key, 0) + 1
            if self._step.number in self._applied.whole:
                return False
            begun = self._applied.begun.setdefault(self._step.number, {})
            new = [key for key in keys if begun.get(key, 0) < counts[key]]
            if new and len(new) < len(keys):
                raise StrategyError(
                    f"step {self._step.number} of run {self._step.run!r} is repeated: an earlier attempt has updated "
                    f"{sorted({*keys} - {*new})} together with other variables than this one does",
                    "let all workers run the same function in a step",
                )
            for key in new:
                begun[key] = counts[key]
            return bool(new)

    def failed(self, keys: Sequence[str]) -> None:
        """Remove the record of a change that failed."""
        with self._lock:
            begun = self._applied.begun.get(self._step.number, {})
            if any(begun.get(key) != self._counts[key] for key in keys):
                # Another attempt has skipped the change and made later ones, or has ended.
                LOGGER.error("a failed update of %s counts as done in %s", sorted(keys), self._step)
                return
            for key in keys:
                begun[key] -= 1

    def ended(self) -> None:
        """Record that all changes of the part are made."""
        with self._lock:
            number = self._step.number
            self._applied.begun.pop(number, None)
            self._applied.whole.add(range(number, number + 1))
