"""Random deaths of parameter tasks, and any order of their notices: each step is applied once at the end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflow.distributed.snapshots.snapshot_messages import AnnounceLeave, AwaitRecovery, Recovered
from dflow.distributed.training.work_messages import Claimed
from dflow.distributed.wire.messages.message import Message
from tests.distributed.snapshots.recovering_tasks import PS, TOTAL, WORKER, Tasks, claim
from tests.effort import examples


class RandomRecovery(RuleBasedStateMachine):
    """A worker that does steps, while ps tasks die at any moment, and the time of each notice is open."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = Tasks()
        self.number = self.last = self.done = self.undone = 0
        self.claimed = range(0)
        self.waits_for: int | None = None
        self.is_over = False

    def answer(self) -> Message | None:
        return None if self.waits_for is None else self.tasks.answers.get(self.waits_for)

    def work(self) -> None:
        if self.is_over:
            return
        if self.waits_for is not None:
            match self.answer():
                case None:
                    return
                case Claimed(first, count):
                    self.claimed, self.done = range(first, first + count), 0
                    self.last = self.number
                    self.is_over = count == 0
                case Recovered(_, undone) if undone != self.undone:
                    self.claimed, self.done, self.undone = range(0), 0, undone
            self.waits_for = None
            return
        if self.tasks.gate:
            return
        if self.done == len(self.claimed):
            self.number += 1
            claim(self.tasks, self.number, self.last, self.done)
            self.waits_for = self.tasks.asks
            return
        step = self.claimed[self.done]
        for task in PS:
            if task in self.tasks.fresh:
                self.tasks.ask(AwaitRecovery(WORKER))
                self.waits_for = self.tasks.asks
                return
            self.tasks.applied[task].add(step)
        self.done += 1

    @rule(times=st.integers(1, 20))
    def do_steps(self, times: int) -> None:
        for _ in range(times):
            self.work()

    @rule(task=st.sampled_from([*PS, WORKER]), times=st.integers(1, 4))
    def handle_notices(self, task: str, times: int) -> None:
        for _ in range(times):
            self.tasks.deliver(task)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.tasks.tick(seconds)

    @precondition(lambda self: not self.is_over)  # a run that is over is done by no worker again
    @rule(task=st.sampled_from(PS))
    def kill(self, task: str) -> None:
        self.tasks.start_again(task)

    @rule(task=st.sampled_from(PS))
    def announce_leave(self, task: str) -> None:
        self.tasks.ask(AnnounceLeave(task), task)

    @precondition(lambda self: not self.is_over)
    @rule()
    def all_goes_well(self) -> None:
        self.tasks.settle()
        self.tasks.snapshot()

    @invariant()
    def no_step_runs_on_a_task_that_is_empty(self) -> None:
        assert all(not self.tasks.applied[task] for task in self.tasks.fresh)

    def teardown(self) -> None:
        """When no task dies any more, the run ends, and each task has applied each step."""
        for _ in range(1000):
            if self.is_over:
                break
            self.tasks.settle()
            self.tasks.tick()
            for _ in range(5):
                self.work()
        self.tasks.settle()
        assert self.is_over
        if not self.tasks.fresh:
            assert self.tasks.applied == {task: {*range(TOTAL)} for task in PS}


TestRandomRecovery = RandomRecovery.TestCase
TestRandomRecovery.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
