"""The steps of shared runs that have changed the state of this process, so that a repeated step changes it only once.

Why: when a worker dies, another one does its claimed steps again, and some parts of them may already be applied on some
tasks. The part of a repeated step runs as usual, but each change of state that an earlier attempt has made is skipped,
and its results are those of the earlier attempt (`kept_results.py`). So each step is applied exactly once on each task.

A step is identified by its run, its number in the run, and the number of the call in the step (`StepOfRun`), which are
the same in all attempts. A change is identified by its variable or resource, and its number among the step's changes of
that one: the order of these is the order of the program.

Invariants: a change is recorded before it is made, so of two concurrent attempts one makes it; a change that failed is
not recorded. A part that ended without an error is recorded as a whole. An attempt whose next change
another one is making waits for its results, and makes the change if that one fails. A step that began before the
process returned to an earlier record is refused, also if its message comes later: it would end steps that are to be
done again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from dflow.lowering.queues.pending_operations import Cancel, OnResults, Results
from dflow.lowering.state.kept_results import KeptRun, RunResults, StepChange
from dflow.lowering.values.index_set import IndexSet
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DeadlineExceeded, StepCancelled, StepEnded, StrategyError, TaskLost

LOGGER = logging.getLogger("dflow")

#: Starts an op; the callback gets its results, or its error. Returns the function that cancels it.
StartOp = Callable[[OnResults], Cancel]

#: Longest wait for the results of a program that another attempt at the step is starting, in s.
STARTING_S = 60.0


class StepOfRun(NamedTuple):
    """A call of a function in step `number` of the run `run`; `call` is its number among the calls in the step.

    unfinished  numbers of earlier steps that the process of this attempt began, and that have not ended everywhere
    epoch       number of returns of all tasks to a snapshot before the attempt began
    is_synchronous  whether it is a synchronous step, or a worker's part in one, whose updates miss none of others
    """

    run: str
    number: int
    call: int = 0
    unfinished: tuple[int, ...] = ()
    epoch: int = 0
    is_synchronous: bool = False


class OwnStep(StepOfRun):
    """A call in a step as the process that does it knows it, for its own part.

    Attempts share the ops on the process's queues and accumulators, but not the changes that programs make.
    """

    __slots__ = ()


@dataclass
class _CallRecord:
    """The applied steps of one call of a run.

    `results` of the run's steps, for all calls
    `whole`   the steps whose parts have ended here
    `begun`   for each other step, the number of changes made by key
    `pending` the changes that are being made and have not ended, with the attempts that wait for their results
    `is_void` whether the process has returned to an earlier record
    """

    results: RunResults
    whole: IndexSet = field(default_factory=IndexSet)
    begun: dict[int, dict[str, int]] = field(default_factory=dict)
    pending: dict[tuple[int, StepChange], deque[_Try]] = field(default_factory=dict)
    is_void: bool = False


class AppliedCall(msgspec.Struct, frozen=True):
    """The record of one call of a run, to be written: the ranges of `_CallRecord.whole`, and `begun`."""

    run: str
    call: int
    whole: tuple[tuple[int, int], ...]
    begun: dict[int, dict[str, int]]


class AppliedCopy(NamedTuple):
    """A copy of a record, to be written: `arrays` has those of `kept`, in order."""

    calls: tuple[AppliedCall, ...] = ()
    kept: tuple[KeptRun, ...] = ()
    arrays: Sequence[Any] = ()


class AppliedSteps:
    """The record of one process; thread-safe."""

    def __init__(self) -> None:
        # A plain lock beside its condition: this is entered several times in each step, where a condition costs more.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._by_call: dict[tuple[str, int], _CallRecord] = {}
        self._results: dict[str, RunResults] = {}
        #: Number of the newest return to an earlier record.
        self._epoch = 0

    def copy(self) -> AppliedCopy:
        """Return a copy of the record, made while no step of a run changes state."""
        with self._lock:
            calls = tuple(
                AppliedCall(*key, record.whole.pairs(), {number: dict(begun) for number, begun in record.begun.items()})
                for key, record in self._by_call.items()
            )
            arrays: list[Any] = []
            kept = tuple(results.copy(run, arrays) for run, results in self._results.items())
            return AppliedCopy(calls, tuple(one for one in kept if one.ended or one.steps), arrays)

    def return_to(self, copy: AppliedCopy, epoch: int) -> None:
        """Return to a copy of the record, as all tasks do for the `epoch`th time.

        Attempts that have begun change nothing any more: they fail.
        """
        arrays = iter(copy.arrays)
        with self._lock:
            self._epoch = epoch
            for record in self._by_call.values():
                record.is_void = True
            self._results = {one.run: RunResults.of(one, arrays) for one in copy.kept}
            self._by_call = {
                (one.run, one.call): _CallRecord(
                    self._results.setdefault(one.run, RunResults()),
                    IndexSet.of(one.whole),
                    {number: dict(counts) for number, counts in one.begun.items()},
                )
                for one in copy.calls
            }

    def attempt(self, step: StepOfRun, owner: str = "") -> StepAttempt:
        """Return a new attempt at the part of a step.

        owner   identity of the process that does the step, which does one step of the run at a time
        raises  StepEnded if the step has ended on all tasks, and its results are not kept any more; TaskLost if the
                process has returned to an earlier record since the attempt began
        """
        with self._lock:
            if step.epoch < self._epoch:
                raise TaskLost(
                    f"step {step.number} of run {step.run!r} began before return {self._epoch} of all tasks to a "
                    f"snapshot: expected a step of after it, got one of after return {step.epoch}",
                    "let the loop do it again",
                )
            results = self._results.get(step.run)
            if results is None:
                results = self._results[step.run] = RunResults()
            _refuse_ended(step, results)
            applied = self._by_call.get((step.run, step.call))
            if applied is None:
                applied = self._by_call[step.run, step.call] = _CallRecord(results)
        return StepAttempt(step, applied, self._changed, self._lock, owner)

    def end_steps(self, run: str, owner: str, unfinished: Iterable[int]) -> None:
        """Note that the steps of the run that `owner` began have ended on all tasks, but the `unfinished` ones."""
        with self._lock:
            if run in self._results:
                self._results[run].end_all(owner, frozenset(unfinished))

    def forget(self, run: str) -> None:
        """Forget a run, which has no more steps here."""
        with self._lock:
            self._results.pop(run, None)
            self._by_call = {key: record for key, record in self._by_call.items() if key[0] != run}


def _refuse_ended(step: StepOfRun, results: RunResults) -> None:
    """Raise StepEnded if the results of a step are not kept any more, since it has ended on all tasks."""
    if step.number in results.ended:
        raise StepEnded(f"step {step.number} of run {step.run!r} has ended on all tasks")


class StepAttempt:
    """One attempt at the part of a step in this process; thread-safe. Made by `AppliedSteps.attempt`."""

    def __init__(
        self, step: StepOfRun, applied: _CallRecord, changed: threading.Condition, lock: threading.Lock, owner: str
    ) -> None:
        self._step, self._applied, self._changed, self._lock, self._owner = step, applied, changed, lock, owner
        self.run, self.is_synchronous = step.run, step.is_synchronous
        #: Whether it is also an attempt at the changes that programs make.
        self.covers_programs = not isinstance(step, OwnStep)
        #: Number of changes of this attempt by key, made or skipped.
        self._counts: dict[str, int] = {}

    def once(
        self,
        keys: Sequence[str],
        change: Callable[[], Sequence[Any]],
        otherwise: Callable[[], Sequence[Any]],
        is_kept: Callable[[Sequence[Any]], bool] = lambda results: False,
    ) -> Sequence[Any]:
        """Return `change()`, or its results if an earlier attempt has made this change of the state under `keys`.

        otherwise  called if an earlier attempt has made it and its results are not kept
        is_kept    whether results are kept
        raises     StrategyError if an earlier attempt has changed some of `keys` here and not the others; StepCancelled
                   if the process has returned to an earlier record since this attempt was made; DeadlineExceeded if
                   another attempt does not end the change
        """
        record, number = self._applied, self._step.number
        with self._lock:
            one = self._counted(keys)
            if not self._changed.wait_for(lambda: (number, one) not in record.pending, STARTING_S):
                raise DeadlineExceeded(
                    f"step {number} of run {self._step.run!r}: another attempt did not end its change of {keys[0]!r} "
                    f"within {STARTING_S:g} s"
                )
            is_new, found = self._begins(keys, one)
        if not is_new:
            return otherwise() if found is None else found
        results: Sequence[Any] | None = None
        try:
            results = change()
        finally:
            with self._lock:
                del record.pending[number, one]
                if results is None:
                    self._undo(keys)
                elif is_kept(results):
                    record.results.keep(number, self._owner, one, results)
                self._changed.notify_all()
        return results

    def start_once(self, key: str, start: StartOp, on_results: OnResults, *, has_results: bool) -> Cancel:
        """Start an op on the resource under `key`, unless an earlier attempt has made it; see `HeldResource.start`.

        start   starts the op, whose results `on_results` gets, or those of the earlier attempt
        raises  as `once`; StrategyError if the results of the earlier attempt are not known
        """
        record, number = self._applied, self._step.number
        with self._lock:
            one = self._counted([key])
            this, waiting = _Try(self, one, start, on_results), record.pending.get((number, one))
            if waiting is not None:
                waiting.append(this)
                return this.cancel
            is_new, found = self._begins([key], one)
        if is_new:
            this.start()
            return this.cancel
        if found is None and has_results:
            raise StrategyError(
                f"step {number} of run {self._step.run!r} is repeated: an earlier attempt has used {key!r} fewer times "
                "than this one does",
                "let the number of a step's ops on a queue not depend on variables that other steps write",
            )
        on_results(() if found is None else tuple(found))
        return lambda error: None

    def _counted(self, keys: Sequence[str]) -> StepChange:
        """Count the next change of the state under `keys`, and return its identity. The lock is held."""
        if self._applied.is_void:
            raise StepCancelled(f"the state that step {self._step.number} uses was restored meanwhile")
        # The process that did it may have gone on since this attempt was made.
        _refuse_ended(self._step, self._applied.results)
        counts = self._counts
        if not counts:
            step = self._step
            self._applied.results.begins(step.number, self._owner, step.unfinished, is_ordered=step.is_synchronous)
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        return StepChange(self._step.call, keys[0], counts[keys[0]])

    def _begins(self, keys: Sequence[str], one: StepChange) -> tuple[bool, Sequence[Any] | None]:
        """Record that `one`, the change of `keys` that was counted, is pending, if it is new. The lock is held.

        Return whether it is new, and else its results, if they are kept.
        """
        counts, number = self._counts, self._step.number
        if self._applied.is_void:
            raise StepCancelled(f"the state that step {self._step.number} uses was restored meanwhile")
        found = self._applied.results.get(number, one)
        if number in self._applied.whole:
            return False, found
        begun = self._applied.begun.setdefault(number, {})
        new = [key for key in keys if begun.get(key, 0) < counts[key]]
        if new and len(new) < len(keys):
            raise StrategyError(
                f"step {number} of run {self._step.run!r} is repeated: an earlier attempt has updated "
                f"{sorted({*keys} - {*new})} together with other variables than this one does",
                "let all workers run the same function in a step",
            )
        if not new:
            return False, found
        for key in new:
            begun[key] = counts[key]
        self._applied.pending[number, one] = deque()
        return True, None

    def _undo(self, keys: Sequence[str]) -> None:
        """Remove the record of a change that failed. The lock is held."""
        begun = self._applied.begun.get(self._step.number, {})
        if any(begun.get(key) != self._counts[key] for key in keys):
            # The function does not order its changes of one variable or resource.
            LOGGER.error("a failed update of %s counts as done in %s", sorted(keys), self._step)
            return
        for key in keys:
            begun[key] -= 1

    def op_ended(self, one: StepChange, outcome: Outcome[Results]) -> Sequence[_Try]:
        """Record the outcome of an op, and return the attempts that waited for it.

        They get the results; if it failed, the first one is to make the change, and the others wait for it.
        """
        with self._lock:
            waiting = self._applied.pending.pop((self._step.number, one))
            if not isinstance(outcome, BaseException):
                if outcome:
                    self._applied.results.keep(self._step.number, self._owner, one, outcome)
                return waiting
            if waiting:
                first = waiting.popleft()
                self._applied.pending[self._step.number, one] = waiting
                return [first]
            self._undo([one.key])
            return ()

    def withdraw(self, one: StepChange, waiter: _Try) -> bool:
        """Remove an attempt that waits for the op of another one; return whether it waited."""
        with self._lock:
            waiting = self._applied.pending.get((self._step.number, one), ())
            if waiter not in waiting:
                return False
            waiting.remove(waiter)  # type: ignore[union-attr]
            return True

    def ended(self) -> None:
        """Record that all changes of the part are made."""
        with self._lock:
            number = self._step.number
            self._applied.begun.pop(number, None)
            self._applied.whole.add(range(number, number + 1))


class _Try:
    """One attempt's try at an op on a resource: it waits for that of another attempt, or starts the op itself."""

    def __init__(self, attempt: StepAttempt, one: StepChange, start: StartOp, on_results: OnResults) -> None:
        self._attempt, self._one, self._start, self._on_results = attempt, one, start, on_results
        self._lock = threading.Lock()
        self._cancel: Cancel | None = None
        self._error: BaseException | None = None
        self._has_ended = False

    def start(self) -> None:
        """Start the op. Raises its error if it cannot be started, which then is not recorded."""
        try:
            cancel = self._start(self._ended)
        except BaseException as error:
            for other in self._recorded(error):
                other.go_on(error)
            raise
        with self._lock:
            self._cancel, why = cancel, self._error
        if why is not None:
            cancel(why)

    def cancel(self, error: BaseException) -> None:
        """End the try with an error, unless it has ended."""
        with self._lock:
            self._error, cancel = error, self._cancel
        if self._attempt.withdraw(self._one, self):
            self._on_results(error)
        elif cancel is not None:
            cancel(error)

    def _ended(self, outcome: Outcome[Results]) -> None:
        others = self._recorded(outcome)
        try:
            self._on_results(outcome)
        finally:
            for other in others:
                other.go_on(outcome)

    def _recorded(self, outcome: Outcome[Results]) -> Sequence[_Try]:
        """Record the outcome, once; return the other attempts, which are to go on with it."""
        with self._lock:
            has_ended, self._has_ended = self._has_ended, True
        return () if has_ended else self._attempt.op_ended(self._one, outcome)

    def go_on(self, outcome: Outcome[Results]) -> None:
        """Go on with the outcome of the op of another attempt: start the op if that failed."""
        if not isinstance(outcome, BaseException):
            self._on_results(outcome)
            return
        try:
            self.start()
        except Exception as error:
            self._on_results(error)
