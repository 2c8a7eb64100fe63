from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.steps.rendezvous import WINDOW, EndWait, Rendezvous, RendezvousStatistics
from dflow.lowering.queues.channel import StepId
from dflow.tracing.errors import InternalError, StepCancelled, TaskLost

STEP = StepId("/job:worker/task:0", 7)
GONE = TaskLost("the task has left")


def make() -> Rendezvous[str, str]:
    return Rendezvous()


def outcome(commands: list[EndWait[str, str]]) -> object:
    ((_, outcome),) = commands
    return outcome


def test_a_second_waiter_is_refused() -> None:
    rendezvous = make()
    rendezvous.take(STEP, "e", "ps", "first")
    error = outcome(rendezvous.take(STEP, "e", "ps", "second"))
    assert isinstance(error, InternalError)
    assert "edge 'e' is awaited twice in step 7 of worker:0" in str(error)


def test_abort_ends_the_waits_of_the_step_and_drops_what_is_there_and_what_comes() -> None:
    rendezvous, error = make(), StepCancelled("why")
    rendezvous.take(STEP, "a", "ps", "waiter")
    rendezvous.put(STEP, "b", "value")
    assert rendezvous.abort(STEP, error) == [("waiter", error)]
    assert rendezvous.put(STEP, "a", "late") == []
    late = outcome(rendezvous.take(STEP, "b", "ps", "late waiter"))
    assert isinstance(late, StepCancelled)
    assert "step 7 of worker:0 has ended here, or was cancelled" in str(late)
    assert rendezvous.statistics() == RendezvousStatistics(0, 0, 0, 0, dropped=2, remembered=1)


@given(st.permutations(range(40)), st.integers(1, 1000), st.integers(0, 10**12))
def test_memory_of_ended_steps_is_bounded_whatever_their_order(order: list[int], stride: int, base: int) -> None:
    rendezvous = make()
    for block in range(8):
        for number in order:
            step = StepId("w", base + (block * 40 + number) * stride)
            rendezvous.finish(step)
            with pytest.raises(StepCancelled):
                rendezvous.begin(step)
    assert rendezvous.statistics().remembered <= WINDOW


def test_a_step_that_has_begun_is_not_ended_by_later_ones() -> None:
    rendezvous, slow = make(), StepId("w", 0)
    rendezvous.begin(slow)
    for number in range(1, 5 * WINDOW, 2):
        rendezvous.finish(StepId("w", number))
    assert rendezvous.put(slow, "e", "value") == []
    assert rendezvous.take(slow, "e", "ps", "waiter") == [("waiter", "value")]
    rendezvous.finish(slow)
    with pytest.raises(StepCancelled):
        rendezvous.begin(slow)


TASKS = ("w0", "w1")
Operation = tuple[str, StepId, str, str]
OPERATIONS = st.tuples(
    st.sampled_from(["put", "put", "take", "take", "begin", "finish", "abort", "expire", "stop", "lose", "welcome"]),
    st.builds(StepId, st.sampled_from(TASKS), st.integers(0, 2)),
    st.sampled_from(["a", "b", "a@1"]),
    st.sampled_from(TASKS),
)


@dataclass
class Model:
    """The same decisions made from the whole history; values and waiters have the numbers of their operations."""

    ended: set[StepId] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    opened: set[StepId] = field(default_factory=set)
    used: set[tuple[StepId, str]] = field(default_factory=set)
    values: dict[tuple[StepId, str], int] = field(default_factory=dict)
    waits: dict[tuple[StepId, str], tuple[int, str]] = field(default_factory=dict)

    def accepts(self, step: StepId) -> bool:
        fine = step in self.opened or (step.origin not in self.lost and step not in self.ended)
        if fine:
            self.opened.add(step)
        return fine

    def apply(self, index: int, operation: Operation) -> set[tuple[int, object]]:
        """Return the waiters that end, each with its value's number or "error"."""
        name, step, edge, task = operation
        place = (step, edge)
        match name:
            case "put" if self.accepts(step) and place not in self.values:
                if place in self.waits:
                    self.delivered(place)
                    return {(self.waits.pop(place)[0], index)}
                if place not in self.used:
                    self.values[place] = index
                    self.used.add(place)
            case "take":
                return self.take(index, place, task)
            case "begin":
                self.accepts(step)
            case "finish" | "abort":
                return self.end({step})
            case "expire":
                return self.fail({place} & set(self.waits))
            case "stop":
                return self.fail({p for p, (_, source) in self.waits.items() if source == task})
            case "lose":
                failed = self.fail({p for p, (_, source) in self.waits.items() if source == task})
                if task not in self.lost:
                    self.ended = {s for s in self.ended if s.origin != task}
                self.lost.add(task)
                return failed | self.end({s for s in self.opened if s.origin == task})
            case "welcome":
                self.lost.discard(task)
        return set()

    def take(self, index: int, place: tuple[StepId, str], source: str) -> set[tuple[int, object]]:
        if not self.accepts(place[0]):
            return {(index, "error")}
        if place in self.values:
            self.delivered(place)
            return {(index, self.values.pop(place))}
        if place in self.used or source in self.lost:
            return {(index, "error")}
        self.used.add(place)
        self.waits[place] = (index, source)
        return set()

    def delivered(self, place: tuple[StepId, str]) -> None:
        if "@" in place[1]:
            self.used.discard(place)

    def fail(self, places: set[tuple[StepId, str]]) -> set[tuple[int, object]]:
        return {(self.waits.pop(place)[0], "error") for place in places}

    def end(self, steps: set[StepId]) -> set[tuple[int, object]]:
        self.ended |= steps
        self.opened -= steps
        self.values = {place: value for place, value in self.values.items() if place[0] not in steps}
        self.used = {place for place in self.used if place[0] not in steps}
        return self.fail({place for place in self.waits if place[0] in steps})


def perform(rendezvous: Rendezvous[int, int], index: int, operation: Operation) -> list[EndWait[int, int]]:
    name, step, edge, task = operation
    match name:
        case "put":
            return rendezvous.put(step, edge, index)
        case "take":
            return rendezvous.take(step, edge, task, index)
        case "begin":
            with contextlib.suppress(StepCancelled, TaskLost):
                rendezvous.begin(step)
            return []
        case "finish":
            return rendezvous.finish(step)
        case "abort":
            return rendezvous.abort(step, GONE)
        case "expire":
            return rendezvous.expire(step, edge, GONE)
        case "stop":
            return rendezvous.stop_waiting_for(task, GONE)
        case "lose":
            return rendezvous.lose(task, GONE)
    rendezvous.welcome(task)
    return []


@given(st.lists(OPERATIONS, min_size=20, max_size=60))
def test_a_rendezvous_answers_as_a_model_of_it_does(operations: list[Operation]) -> None:
    rendezvous: Rendezvous[int, int] = Rendezvous()
    model = Model()
    asked, answered, delivered = set(), [], 0
    for index, operation in enumerate(operations):
        commands = perform(rendezvous, index, operation)
        ended = [(waiter, "error" if isinstance(end, BaseException) else end) for waiter, end in commands]
        assert set(ended) == model.apply(index, operation)
        asked |= {index} if operation[0] == "take" else set()
        answered += [waiter for waiter, _ in ended]
        delivered += sum(outcome != "error" for _, outcome in ended)
    statistics = rendezvous.statistics()
    assert len(answered) == len(set(answered))
    assert statistics.waiters == len(asked - set(answered)) == len(model.waits)
    assert statistics.values == len(model.values)
    assert statistics.delivered == delivered
    assert statistics.open_steps == len(model.opened)


def test_values_for_the_steps_of_a_past_life_are_dropped() -> None:
    rendezvous = make()
    rendezvous.count_from(STEP.origin, STEP.number + 1)
    assert rendezvous.put(STEP, "e", "late") == []
    assert rendezvous.statistics() == RendezvousStatistics(0, 0, 0, 0, dropped=1, remembered=0)
    with pytest.raises(StepCancelled, match="has ended here"):
        rendezvous.begin(STEP)
    rendezvous.begin(StepId(STEP.origin, STEP.number + 1))
