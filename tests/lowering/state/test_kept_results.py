"""Results of changes are those of the first attempt: elements, tickets and counts are exact, whatever dies and returns.

A model of a run: a queue and a counter of tickets are on the first task, and sums over the steps on the second one.
Workers claim steps, do them, report them late, fail, and die; both tasks return to snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.queues.pending_operations import Cancel, OnResults
from dflow.lowering.state.applied_steps import AppliedCopy, AppliedSteps, OwnStep, StepAttempt, StepOfRun
from dflow.tracing.errors import DeadlineExceeded, QueueClosed, StepCancelled, StepEnded, StrategyError, TaskLost
from tests.effort import examples

STEPS = 12


class Elements:
    """A closed queue of the numbers from 0 on, whose ops end immediately."""

    def __init__(self, count: int = STEPS) -> None:
        self.left = [*range(count)]

    def start(self, on_results: OnResults) -> Cancel:
        """Take an element."""
        on_results((np.int32(self.left.pop(0)),) if self.left else QueueClosed("the queue is closed"))
        return lambda error: None


def taken(attempt: StepAttempt, queue: Elements) -> int:
    """The element that an attempt takes. Raises its error."""
    found: list[Any] = []
    attempt.start_once("q", queue.start, found.append, has_results=True)
    (outcome,) = found
    if isinstance(outcome, BaseException):
        raise outcome
    (element,) = outcome
    return int(element)


class Tasks:
    """The two tasks: `seen` has the elements and tickets that steps have brought to the second one."""

    def __init__(self) -> None:
        self.first, self.second = AppliedSteps(), AppliedSteps()
        self.queue, self.tickets, self.epoch = Elements(), 0, 0
        self.seen: list[tuple[int, int]] = []

    def ticket(self) -> Sequence[Any]:
        """Return the next number of the counter."""
        self.tickets += 1
        return (np.int32(self.tickets - 1),)

    def copy(self) -> Any:
        """A snapshot of both."""
        return self.first.copy(), self.second.copy(), list(self.queue.left), self.tickets, list(self.seen)

    def return_to(self, copy: Any) -> None:
        """Return to a snapshot."""
        first, second, queue, self.tickets, seen = copy
        self.epoch += 1
        self.first.return_to(first, self.epoch)
        self.second.return_to(second, self.epoch)
        self.queue.left = list(queue)
        self.seen = list(seen)


@dataclass
class Worker:
    """A worker: the steps of its claim, how many of them it has done and reported, and the step that it does now.

    life        changes with each process
    unfinished  the steps that this process began and that have not ended
    """

    life: str
    claim: list[int] = field(default_factory=list)
    done: int = 0
    reported: int = 0
    unfinished: set[int] = field(default_factory=set)
    step: Step | None = None


@dataclass
class Step:
    """An attempt of a worker at a step: its next phase, and what it took."""

    number: int
    first: StepAttempt
    second: StepAttempt
    phase: int = 0
    element: int = -1
    ticket: int = -1


class Run:
    """The run, its workers, and the newest snapshot. Each method is an event; most do nothing when they cannot come."""

    def __init__(self, workers: int) -> None:
        self.tasks, self.lives = Tasks(), 0
        self.pool = set(range(STEPS))
        self.workers = [self._process() for _ in range(workers)]
        self.snapshot = self._copy()

    def _process(self) -> Worker:
        self.lives += 1
        return Worker(f"process {self.lives}")

    def _copy(self) -> Any:
        held = [step for worker in self.workers for step in worker.claim[worker.reported :]]
        return self.tasks.copy(), self.pool | {*held}

    def begin(self, worker: Worker) -> None:
        """Begin the next step of the claim, or claim some."""
        if worker.step is not None:
            return
        if worker.done == len(worker.claim):
            self.report(worker)
            worker.claim, worker.done, worker.reported = sorted(self.pool)[:3], 0, 0
            self.pool -= {*worker.claim}
        if worker.claim:
            number = worker.claim[worker.done]
            of = StepOfRun("run", number, 0, tuple(worker.unfinished - {number}), self.tasks.epoch)
            try:
                first, second = (one.attempt(of, worker.life) for one in (self.tasks.first, self.tasks.second))
            except StepEnded:
                worker.done += 1
                return
            worker.step = Step(number, first, second)

    def go_on(self, worker: Worker) -> None:
        """Do the next phase of a step: take, draw a ticket, bring both to the second task, end there, end here."""
        if worker.step is None:
            self.begin(worker)
            return
        try:
            self._go_on(worker, worker.step)
        except StepEnded:
            worker.step, worker.done = None, worker.done + 1

    def _go_on(self, worker: Worker, step: Step) -> None:
        match step.phase:
            case 0:
                step.element = taken(step.first, self.tasks.queue)
            case 1:
                (ticket,) = step.first.once(["tickets", "other"], self.tasks.ticket, lambda: (), bool)
                step.ticket = int(ticket)
            case 2:
                brought = step.element, step.ticket
                step.second.once(["seen"], lambda: self.tasks.seen.append(brought) or (), tuple)  # type: ignore[func-returns-value]
            case 3:
                step.second.ended()
            case 4:
                step.first.ended()
            case 5:
                worker.unfinished.discard(step.number)
                worker.step, worker.done = None, worker.done + 1
        step.phase += 1

    def report(self, worker: Worker) -> None:
        """Report the steps that are done."""
        worker.reported = worker.done

    def fail(self, worker: Worker) -> None:
        """The step fails: the worker reports, returns its claim, and goes on with any other."""
        if worker.step is not None:
            worker.unfinished.add(worker.step.number)
        self.report(worker)
        self._give_back(worker)

    def die(self, worker: Worker) -> None:
        """The process ends, and the next one begins; steps that were not reported are done again."""
        self._give_back(worker)
        self.workers[self.workers.index(worker)] = self._process()

    def _give_back(self, worker: Worker) -> None:
        self.pool |= {*worker.claim[worker.reported :]}
        worker.claim, worker.done, worker.reported, worker.step = [], 0, 0, None

    def save(self, worker: Worker) -> None:
        """Make a snapshot, if no step runs."""
        if all(one.step is None for one in self.workers):
            self.snapshot = self._copy()

    def go_back(self, worker: Worker) -> None:
        """Return to the newest snapshot: all claims are void, and steps that run fail."""
        copy, pool = self.snapshot
        self.tasks.return_to(copy)
        for one in self.workers:
            if one.step is not None:
                one.unfinished.add(one.step.number)
            self._give_back(one)
        self.pool = set(pool)

    def finish(self) -> None:
        """Do all steps."""
        worker = self.workers[0]
        for other in self.workers[1:]:
            self._give_back(other)
        while self.pool or worker.step is not None or worker.done < len(worker.claim):
            self.go_on(worker)


EVENTS = [Run.go_on] * 8 + [Run.report, Run.fail, Run.die, Run.save, Run.go_back]


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(st.integers(0, len(EVENTS) - 1), st.integers(0, 1)), max_size=60))
def test_each_element_and_each_ticket_is_used_once(schedule: list[tuple[int, int]]) -> None:
    run = Run(workers=2)
    for event, worker in schedule:
        EVENTS[event](run, run.workers[worker])
    run.finish()
    for used in zip(*run.tasks.seen, strict=True):  # the elements, and the tickets
        assert sorted(used) == [*range(STEPS)]
    assert not run.tasks.queue.left


def test_an_attempt_waits_for_the_op_of_another_one_and_makes_it_if_that_is_cancelled() -> None:
    applied = AppliedSteps()
    waiting: list[tuple[OnResults, list[BaseException]]] = []

    def start(on_results: OnResults) -> Cancel:
        errors: list[BaseException] = []
        waiting.append((on_results, errors))

        def cancel(error: BaseException) -> None:
            errors.append(error)
            on_results(error)

        return cancel

    def attempt() -> tuple[Cancel, list[Any]]:
        found: list[Any] = []
        tried = applied.attempt(StepOfRun("run", 0))
        return tried.start_once("q", start, found.append, has_results=True), found

    (cancel, first), (cancel_second, second), (_, third) = attempt(), attempt(), attempt()
    assert len(waiting) == 1
    cancel_second(StepCancelled("left"))
    assert isinstance(second.pop(), StepCancelled)
    cancel(StepCancelled("died"))
    assert isinstance(first.pop(), StepCancelled)
    assert (len(waiting), third) == (2, [])
    waiting[1][0]((7,))
    assert third == [(7,)]
    (_, fourth) = attempt()
    assert (len(waiting), fourth) == (2, [(7,)])


def test_an_op_that_cannot_start_is_not_recorded() -> None:
    applied, found = AppliedSteps(), list[Any]()

    def refuse(on_results: OnResults) -> Cancel:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            applied.attempt(StepOfRun("run", 0)).start_once("q", refuse, found.append, has_results=False)
    assert not found


def test_an_error_of_an_op_is_not_kept() -> None:
    applied, queue, step = AppliedSteps(), Elements(0), StepOfRun("run", 0)
    with pytest.raises(QueueClosed):
        taken(applied.attempt(step), queue)
    assert taken(applied.attempt(step), Elements()) == 0
    assert taken(applied.attempt(step), queue) == 0


def test_results_are_freed_by_the_next_step_of_their_process_and_the_step_is_then_refused() -> None:
    applied, queue = AppliedSteps(), Elements()
    assert taken(applied.attempt(StepOfRun("run", 0), "a"), queue) == 0
    assert taken(applied.attempt(StepOfRun("run", 1), "b"), queue) == 1
    assert taken(applied.attempt(StepOfRun("run", 2), "a"), queue) == 2
    with pytest.raises(StepEnded, match="step 0 of run 'run' has ended on all tasks"):
        applied.attempt(StepOfRun("run", 0))
    assert taken(applied.attempt(StepOfRun("run", 1), "c"), queue) == 1  # b has died, and c does its step
    assert taken(applied.attempt(StepOfRun("run", 3), "b"), queue) == 3
    assert taken(applied.attempt(StepOfRun("run", 4, 0, (2,)), "a"), queue) == 4
    assert taken(applied.attempt(StepOfRun("run", 2, 0, (4,)), "a"), queue) == 2
    applied.end_steps("run", "a", [4])
    assert taken(applied.attempt(StepOfRun("run", 4), "a"), queue) == 4
    with pytest.raises(StepEnded):
        applied.attempt(StepOfRun("run", 2))
    for number, process in enumerate(["a", "a", "b", "b"]):
        assert taken(applied.attempt(StepOfRun("of a task", number, is_synchronous=True), process), queue) == 5 + number
    with pytest.raises(StepEnded):  # b is the next process of a's task
        applied.attempt(StepOfRun("of a task", 1))


def test_a_copy_has_the_results() -> None:
    applied, queue = AppliedSteps(), Elements()
    step = StepOfRun("run", 1, 2)
    assert taken(applied.attempt(StepOfRun("run", 0), "a"), queue) == 0
    assert taken(applied.attempt(step, "a"), queue) == 1
    copy = applied.copy()
    assert len(copy.arrays) == 1
    other = AppliedSteps()
    other.return_to(copy, 1)
    step = step._replace(epoch=1)
    assert taken(other.attempt(step, "a"), queue) == 1
    with pytest.raises(StepEnded):
        other.attempt(StepOfRun("run", 0, epoch=1))
    other.return_to(AppliedCopy(), 2)
    assert taken(other.attempt(step._replace(epoch=2), "a"), queue) == 2


def test_a_step_whose_message_comes_after_a_return_ends_no_earlier_one() -> None:
    applied, queue = AppliedSteps(), Elements()
    assert taken(applied.attempt(StepOfRun("run", 0), "a"), queue) == 0
    copy, late = applied.copy(), StepOfRun("run", 1)
    applied.return_to(copy, 1)
    with pytest.raises(TaskLost, match="step 1 of run 'run' began before return 1 of all tasks"):
        applied.attempt(late, "a")
    assert taken(applied.attempt(StepOfRun("run", 0, epoch=1), "a"), queue) == 0
    assert taken(applied.attempt(late._replace(epoch=1), "a"), queue) == 1


def test_a_change_of_variables_that_an_earlier_attempt_changed_in_part_is_refused() -> None:
    applied = AppliedSteps()
    applied.attempt(StepOfRun("run", 3)).once(["a"], tuple, tuple)
    with pytest.raises(StrategyError, match=r"step 3 of run 'run' .* updated \['a'\]") as raised:
        applied.attempt(StepOfRun("run", 3)).once(["a", "b"], tuple, tuple)
    assert "let all workers run the same function in a step" in str(raised.value)


def test_a_programs_results_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.lowering.state.applied_steps.STARTING_S", 0.01)
    applied, step = AppliedSteps(), StepOfRun("run", 0)

    def again() -> Any:
        return applied.attempt(step).once(["a"], lambda: (2,), lambda: (3,), bool)

    with pytest.raises(DeadlineExceeded, match=r"another attempt did not end its change of 'a' within 0\.01 s"):
        applied.attempt(step).once(["a"], again, lambda: (1,), bool)
    assert again() == (2,)


def test_more_ops_than_in_the_earlier_attempt_are_refused() -> None:
    applied, queue, step = AppliedSteps(), Elements(), StepOfRun("run", 0)
    first = applied.attempt(step)
    assert taken(first, queue) == 0
    first.ended()
    second = applied.attempt(step)
    assert taken(second, queue) == 0
    with pytest.raises(StrategyError, match="an earlier attempt has used 'q' fewer times than this one does"):
        taken(second, queue)


def test_a_process_shares_ops_on_its_own_resources_between_attempts_and_forgets_them() -> None:
    applied, queue = AppliedSteps(), Elements()
    assert not applied.attempt(OwnStep("loop", 0)).covers_programs
    assert taken(applied.attempt(OwnStep("loop", 0)), queue) == 0
    assert taken(applied.attempt(OwnStep("loop", 0)), queue) == 0
    assert taken(applied.attempt(OwnStep("loop", 1)), queue) == 1
    applied.forget("loop")
    assert applied.copy() == AppliedCopy((), (), [])
