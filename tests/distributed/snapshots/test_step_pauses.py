"""Pauses of the shared steps: any order of requests, reports, joins and deaths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, SendReply
from dflow.distributed.coordinator.coordinator_part import Received
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.snapshots.pause_messages import HoldSteps, ResumeSteps, StepsHeld, StepsPaused, StepsResumed
from dflow.distributed.snapshots.step_pauses import StepPauses
from tests.effort import examples

A, B, C = (f"/job:worker/task:{index}" for index in range(3))
TASKS = st.sampled_from([A, B, C])


class RandomPauses(RuleBasedStateMachine):
    """Tasks that hold their steps as notified, ask for pauses, die, lose their connections and join again.

    `runs` has the tasks that may run steps; a task that holds its steps is not among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, int | None] = {}
        core: Any = SimpleNamespace(members=SimpleNamespace(connections=lambda: self.live))
        self.pauses, self.is_clear = StepPauses(core), True
        self.peers, self.asks = 0, 0
        #: By task, the number of the pause that it knows of; tasks whose notice or report is still under way.
        self.known: dict[str, int] = {}
        self.reported: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        #: The task in whose pause state is captured, its number, and whether a step has run since.
        self.capture: tuple[str, int] | None = None
        self.has_run = False

    @initialize(tasks=st.sets(TASKS, min_size=1))
    def begin(self, tasks: set[str]) -> None:
        for task in sorted(tasks):
            self.join(task)

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Broadcast):
                assert isinstance(command.message, HoldSteps)
                for task, peer in self.live.items():
                    if peer is not None and peer in command.peers:
                        self.known[task] = command.message.number
                        self.reported.pop(task, None)
            else:
                assert isinstance(command, SendReply)
                assert isinstance(command.message, StepsPaused)
                [task] = [task for task, ask in self.requests.items() if ask == command.ask]
                self.capture, self.has_run = (task, command.message.number), False
                number = command.message.number
                assert all(self.reported.get(task) == number for task in self.live), "a task was not waited for"

    def go_on(self) -> None:
        self.carry_out(self.pauses.go_on(self.is_clear))

    def may_run(self, task: str) -> bool:
        return task in self.live and not self.known.get(task)

    @rule(task=TASKS)
    def join(self, task: str) -> None:
        self.peers += 1
        self.live[task] = self.peers
        # A task that joins, for the first time or again, holds nothing until it is notified.
        self.known[task] = 0
        self.reported.pop(task, None)
        self.has_run = self.has_run or self.capture is not None
        self.carry_out([*self.pauses.on_join(task, self.peers, False, 0.0)])
        self.go_on()

    @rule(task=TASKS)
    def lose_connection(self, task: str) -> None:
        if task in self.live:
            self.live[task] = None

    @rule(task=TASKS, leaves_steps=st.booleans())
    def die(self, task: str, leaves_steps: bool) -> None:
        if task in self.live:
            del self.live[task]
            self.requests.pop(task, None)
            if self.capture is not None and self.capture[0] == task:
                self.capture = None
            self.is_clear = self.is_clear and not leaves_steps
            self.carry_out(self.pauses.on_leave([ReleaseTask(task, 0, "killed")], 0.0))
            self.go_on()

    @rule()
    def others_do_what_was_left(self) -> None:
        if any(map(self.may_run, self.live)) or not self.live:
            self.is_clear = True
            self.go_on()

    @rule(task=TASKS)
    def report(self, task: str) -> None:
        number = self.known.get(task, 0)
        if self.live.get(task) is not None and number and task not in self.reported:
            self.reported[task] = number
            self.pauses.held(StepsHeld(task, number), Received(0.0, 0, 0, 0))
            self.go_on()

    @rule(task=TASKS)
    def ask(self, task: str) -> None:
        if self.live.get(task) is not None and task not in self.requests:
            self.asks += 1
            self.requests[task] = self.asks
            self.carry_out([*self.pauses.ask(task, self.asks)])
            self.go_on()

    @precondition(lambda self: self.capture is not None)
    @rule()
    def ask_again_and_get_the_same_pause(self) -> None:
        assert self.capture is not None
        task, number = self.capture
        self.asks += 1
        self.requests[task] = self.asks
        assert self.pauses.ask(task, self.asks) == [SendReply(self.asks, StepsPaused(number))]
        self.go_on()

    @rule(task=TASKS)
    def resume(self, task: str) -> None:
        if self.live.get(task) is None or task not in self.requests:
            return
        number = self.capture[1] if self.capture is not None and self.capture[0] == task else 0
        del self.requests[task]
        *commands, reply = self.pauses.resume(ResumeSteps(task, number), Received(0.0, 0, 9, 0))
        assert reply == SendReply(9, StepsResumed(number > 0 and not self.has_run))
        if number:
            self.capture = None
        self.carry_out(commands)
        self.go_on()

    @invariant()
    def a_pause_that_is_over_holds_no_task(self) -> None:
        if not self.pauses.is_on:
            assert not any(self.known[task] for task, peer in self.live.items() if peer is not None)

    @invariant()
    def a_request_waits_only_for_a_task_or_for_steps_to_be_done(self) -> None:
        if self.requests and self.is_clear and self.capture is None:
            assert self.pauses.is_on
            assert any(self.reported.get(task) != self.pauses._number for task in self.live)


TestRandomPauses = RandomPauses.TestCase
TestRandomPauses.settings = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)
