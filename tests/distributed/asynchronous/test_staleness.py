"""The bound of staleness as a state machine, compared with counters of the steps' reads and updates."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.asynchronous.staleness import BoundedSteps
from dflow.distributed.asynchronous.staleness_messages import StepAdmitted
from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.wire.messages.basic import Failure
from tests.effort import examples

WORKERS = [f"/job:worker/task:{index}" for index in range(4)]


@dataclass
class Step:
    """A step that runs: the number of updates before its reads, and whether its own is applied."""

    read_at: int
    is_applied: bool = False


@dataclass
class Model:
    """Workers whose steps read and update one variable, as the bound allows; `prefetch` as in `Async`."""

    steps: BoundedSteps
    prefetch: int
    updates: int = 0
    asked: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    running: dict[str, Step] = field(default_factory=dict)
    #: By worker, its fetched values: their versions, and the number of updates before the reads.
    held: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    ended: list[tuple[str, int]] = field(default_factory=list)
    largest: int = 0

    def follow(self, commands: list[SendReply]) -> None:
        for command in commands:
            worker = next(worker for worker, request in self.waiting.items() if request == command.ask)
            del self.waiting[worker]
            if not isinstance(admitted := command.message, StepAdmitted):
                continue
            held = self.held.setdefault(worker, [])
            read_at = self.updates
            if admitted.uses_held:
                _, read_at = held.pop(0)
            else:
                held.clear()
            self.running[worker] = Step(read_at)
            # The next values are read after this step's update, or with `prefetch` some of them now.
            while len(held) < self.prefetch:
                held.append((admitted.version, self.updates))
            held.append((admitted.version + 1, -1))

    def begin(self, worker: str) -> None:
        if worker in self.running:
            self.end(worker)
        self.asked += 1
        held = self.held.get(worker)
        commands = self.steps.begin(self.asked, worker, self.asked, held[0][0] if held else None)
        if worker in self.waiting:
            [refused, *commands] = commands
            assert isinstance(refused.message, Failure)
        self.waiting[worker] = self.asked
        self.follow(commands)

    def apply(self, worker: str) -> None:
        step = self.running.get(worker)
        if step is None or step.is_applied:
            return
        step.is_applied = True
        self.largest = max(self.largest, self.updates - step.read_at)
        self.updates += 1
        if held := self.held.get(worker):
            version, _ = held.pop()
            held.append((version, self.updates))

    def end(self, worker: str) -> None:
        self.apply(worker)
        self.running.pop(worker, None)
        self.waiting.pop(worker, None)
        number = self.steps.workers.get(worker, 0)
        self.follow(self.steps.end(worker, number))
        self.ended.append((worker, number))

    def repeat(self, worker: str) -> None:
        """Bring the end of some worker's step a second time."""
        if self.ended:
            self.follow(self.steps.end(*self.ended[0]))
            self.ended.append(self.ended.pop(0))

    def die(self, worker: str) -> None:
        self.running.pop(worker, None)
        self.held.pop(worker, None)
        self.follow(self.steps.leave(worker))

    def pause(self, worker: str) -> None:
        """Drop the fetched values, as after a long pause of the loop."""
        self.held.pop(worker, None)

    def lapse(self, worker: str) -> None:
        if worker in self.waiting:
            self.follow(self.steps.timed_out(self.waiting[worker]))


ACTIONS = ["begin", "apply", "end", "die", "pause", "lapse", "repeat"]
#: Mostly steps, with few faults.
DRAWN = st.sampled_from(["begin"] * 4 + ["apply"] * 3 + ["end"] * 3 + ACTIONS)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(DRAWN, st.sampled_from(WORKERS)), max_size=80), st.integers(0, 12), st.integers(0, 2))
def test_no_step_lacks_more_updates_than_the_bound(actions: list[tuple[str, str]], limit: int, prefetch: int) -> None:
    model = Model(BoundedSteps("run", limit, 100), prefetch)
    for action, worker in actions:
        getattr(model, action)(worker)
        assert model.largest <= limit
        assert not (model.waiting and not model.running and not model.steps.waiting)
    for worker in WORKERS:
        model.begin(worker)
    for _ in WORKERS:
        for worker in list(model.running):
            model.end(worker)
    assert not model.waiting, "a step waits, and none runs"
    assert model.largest <= limit
    for worker in WORKERS:
        model.die(worker)
    assert model.steps.is_idle


def admitted(commands: list[SendReply]) -> list[int]:
    return [command.ask for command in commands if isinstance(command.message, StepAdmitted)]


def test_a_request_that_waited_too_long_keeps_its_place() -> None:
    steps = BoundedSteps("run", 0)
    steps.begin(1, "a", 1)
    steps.begin(2, "b", 2)
    steps.begin(3, "c", 3)
    steps.timed_out(2)
    assert steps.end("a", 1) == []
    [refused] = steps.timed_out(3)
    assert "before b has begun its step" in refused.message.text  # type: ignore[attr-defined]
    assert admitted(steps.begin(4, "b", 4)) == [4]


@pytest.mark.parametrize(("limit", "uses_held"), [(3, False), (4, True)])
def test_held_values_are_used_if_each_other_worker_can_still_begin_a_step(limit: int, uses_held: bool) -> None:
    steps = BoundedSteps("run", limit)
    steps.begin(1, "a", 1)
    steps.begin(2, "b", 2)
    steps.begin(3, "b", 3)
    # The values of version 0 lack the steps of both, and the second of b runs.
    [command] = steps.begin(4, "a", 4, held=0)
    assert command == SendReply(4, StepAdmitted(2, uses_held, 2))
