from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.steps.rendezvous import WINDOW, EndWait, Rendezvous, RendezvousStatistics
from dflow.lowering.queues.channel import StepId
from dflow.tracing.errors import DeadlineExceeded, InternalError, StepCancelled, TaskLost

STEP = StepId("/job:worker/task:0", 7)
GONE = TaskLost("the task has left")


def make() -> Rendezvous[str, str]:
    return Rendezvous()


def outcome(commands: list[EndWait[str, str]]) -> object:
    (command,) = commands
    return command.outcome


@pytest.mark.parametrize("first", ["put", "take"])
def test_a_value_meets_its_waiter_in_either_order(first: str) -> None:
    rendezvous = make()
    if first == "put":
        assert rendezvous.put(STEP, "e", "value") == []
        assert rendezvous.take(STEP, "e", "ps", "waiter") == [EndWait("waiter", "value")]
    else:
        assert rendezvous.take(STEP, "e", "ps", "waiter") == []
        assert rendezvous.put(STEP, "e", "value") == [EndWait("waiter", "value")]
    assert rendezvous.statistics() == RendezvousStatistics(1, 0, 0, 1, 0, 0)


def test_steps_and_edges_do_not_mix() -> None:
    rendezvous = make()
    rendezvous.put(STEP, "e", "value")
    assert rendezvous.take(STEP, "f", "ps", "other edge") == []
    assert rendezvous.take(StepId(STEP.origin, 8), "e", "ps", "other step") == []
    assert rendezvous.take(StepId("/job:worker/task:1", 7), "e", "ps", "other origin") == []


@pytest.mark.parametrize("taken", [False, True])
def test_a_second_value_is_dropped(taken: bool) -> None:
    rendezvous = make()
    rendezvous.put(STEP, "e", "first")
    if taken:
        rendezvous.take(STEP, "e", "ps", "waiter")
    assert rendezvous.put(STEP, "e", "second") == []
    assert rendezvous.statistics().dropped == 1


def test_of_turns_that_are_over_nothing_is_kept() -> None:
    rendezvous = make()
    for turn in range(3):
        rendezvous.put(STEP, f"e@{turn}", turn)
        assert rendezvous.take(STEP, f"e@{turn}", "ps", "waiter") == [EndWait("waiter", turn)]
        assert rendezvous.take(STEP, f"e@{turn}.0", "ps", "inner") == []
        assert rendezvous.put(STEP, f"e@{turn}.0", "value") == [EndWait("inner", "value")]
    assert rendezvous._steps[STEP] == {}


@pytest.mark.parametrize("delivered", [False, True])
def test_a_second_waiter_is_refused(delivered: bool) -> None:
    rendezvous = make()
    rendezvous.take(STEP, "e", "ps", "first")
    if delivered:
        rendezvous.put(STEP, "e", "value")
    error = outcome(rendezvous.take(STEP, "e", "ps", "second"))
    assert isinstance(error, InternalError)
    assert "edge 'e' is awaited twice in step 7 of worker:0" in str(error)


def test_abort_ends_the_waits_of_the_step_and_drops_what_is_there_and_what_comes() -> None:
    rendezvous, error = make(), StepCancelled("why")
    rendezvous.take(STEP, "a", "ps", "waiter")
    rendezvous.put(STEP, "b", "value")
    assert rendezvous.abort(STEP, error) == [EndWait("waiter", error)]
    assert rendezvous.put(STEP, "a", "late") == []
    late = outcome(rendezvous.take(STEP, "b", "ps", "late waiter"))
    assert isinstance(late, StepCancelled)
    assert "step 7 of worker:0 has ended here, or was cancelled" in str(late)
    assert rendezvous.statistics() == RendezvousStatistics(0, 0, 0, 0, dropped=2, remembered=1)


def test_a_step_that_was_aborted_before_it_was_heard_of_does_not_begin() -> None:
    rendezvous = make()
    assert rendezvous.abort(STEP, StepCancelled("why")) == []
    with pytest.raises(StepCancelled, match="has ended here, or was cancelled"):
        rendezvous.begin(STEP)


def test_finish_ends_forgotten_waits_with_a_reason() -> None:
    rendezvous = make()
    rendezvous.begin(STEP)
    rendezvous.take(STEP, "e", "ps", "waiter")
    assert "step 7 of worker:0 has ended" in str(outcome(rendezvous.finish(STEP)))


def test_an_expired_wait_ends_once() -> None:
    rendezvous, late = make(), DeadlineExceeded("waited 1 s")
    rendezvous.take(STEP, "e", "ps", "waiter")
    assert rendezvous.expire(STEP, "e", late) == [EndWait("waiter", late)]
    assert rendezvous.expire(STEP, "e", late) == []
    assert rendezvous.put(STEP, "e", "value") == []
    assert rendezvous.expire(StepId("x", 0), "e", late) == []


def test_losing_a_task_ends_its_steps_and_the_waits_for_its_values() -> None:
    rendezvous, mine = make(), StepId("/job:worker/task:1", 3)
    rendezvous.take(STEP, "a", "ps", "of its step")
    rendezvous.take(mine, "b", STEP.origin, "for its value")
    rendezvous.take(mine, "c", "ps", "of no concern")
    ended = rendezvous.lose(STEP.origin, GONE)
    assert set(ended) == {EndWait("of its step", GONE), EndWait("for its value", GONE)}
    assert rendezvous.put(STEP, "a", "late") == []
    assert rendezvous.take(mine, "d", STEP.origin, "later") == [EndWait("later", GONE)]
    assert rendezvous.take(STEP, "d", "ps", "later") == [EndWait("later", GONE)]
    with pytest.raises(TaskLost, match="the task has left"):
        rendezvous.begin(STEP)
    assert rendezvous.put(mine, "c", "value") == [EndWait("of no concern", "value")]


def test_a_value_that_came_before_its_sender_was_lost_is_delivered() -> None:
    rendezvous = make()
    rendezvous.put(STEP, "e", "value")
    rendezvous.lose("ps", GONE)
    assert rendezvous.take(STEP, "e", "ps", "waiter") == [EndWait("waiter", "value")]


def test_a_task_that_comes_back_may_count_its_steps_anew() -> None:
    rendezvous = make()
    rendezvous.finish(STEP)
    rendezvous.lose(STEP.origin, GONE)
    rendezvous.welcome(STEP.origin)
    rendezvous.begin(STEP)
    assert rendezvous.open_steps(STEP.origin) == (STEP,)


def test_what_ended_with_the_loss_of_a_task_stays_ended_when_it_comes_back() -> None:
    rendezvous, cancelled = make(), StepId(STEP.origin, STEP.number + 1)
    rendezvous.begin(STEP)
    rendezvous.lose(STEP.origin, GONE)
    rendezvous.abort(cancelled, GONE)
    rendezvous.lose(STEP.origin, GONE)
    rendezvous.welcome(STEP.origin)
    for step in (STEP, cancelled):
        assert rendezvous.put(step, "e", "late") == []
        with pytest.raises(StepCancelled):
            rendezvous.begin(step)
    assert rendezvous.statistics().values == 0


def test_a_lost_connection_ends_waits_but_not_steps() -> None:
    rendezvous = make()
    rendezvous.take(STEP, "e", "ps", "waiter")
    assert rendezvous.stop_waiting_for("ps", GONE) == [EndWait("waiter", GONE)]
    assert rendezvous.take(STEP, "f", "ps", "later") == []


@given(st.permutations(range(40)), st.integers(1, 1000), st.integers(0, 10**12))
def test_memory_of_ended_steps_is_bounded_whatever_their_order(order: list[int], stride: int, base: int) -> None:
    rendezvous = make()
    for block in range(20):
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
    assert rendezvous.take(slow, "e", "ps", "waiter") == [EndWait("waiter", "value")]
    rendezvous.finish(slow)
    with pytest.raises(StepCancelled):
        rendezvous.begin(slow)


TASKS = ("w0", "w1")
Operation = tuple[str, StepId, str, str]
OPERATIONS = st.tuples(
    st.sampled_from(["put", "put", "take", "take", "begin", "finish", "abort", "expire", "stop", "lose", "welcome"]),
    st.builds(StepId, st.sampled_from(TASKS), st.integers(0, 3)),
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


@given(st.lists(OPERATIONS, max_size=60))
def test_it_does_what_the_model_does(operations: list[Operation]) -> None:
    rendezvous: Rendezvous[int, int] = Rendezvous()
    model = Model()
    asked, answered = set(), []
    for index, operation in enumerate(operations):
        commands = perform(rendezvous, index, operation)
        ended = [(c.waiter, "error" if isinstance(c.outcome, BaseException) else c.outcome) for c in commands]
        assert set(ended) == model.apply(index, operation)
        asked |= {index} if operation[0] == "take" else set()
        answered += [waiter for waiter, _ in ended]
    statistics = rendezvous.statistics()
    assert len(answered) == len(set(answered))
    assert statistics.waiters == len(asked - set(answered)) == len(model.waits)
    assert statistics.values == len(model.values)
    assert statistics.open_steps == len(model.opened)


def test_values_for_the_steps_of_a_past_life_are_dropped() -> None:
    rendezvous = make()
    rendezvous.count_from(STEP.origin, STEP.number + 1)
    assert rendezvous.put(STEP, "e", "late") == []
    assert rendezvous.statistics() == RendezvousStatistics(0, 0, 0, 0, dropped=1, remembered=0)
    with pytest.raises(StepCancelled, match="has ended here"):
        rendezvous.begin(STEP)
    rendezvous.begin(StepId(STEP.origin, STEP.number + 1))
