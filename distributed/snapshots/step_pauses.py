"""Pauses of all shared steps, one after the other, during which the asking task captures the state of all tasks.

Why: a step changes state on several tasks. A snapshot of all of them has all of a step or none of it only if no step
runs while they capture their state, which takes two messages; the values are written later. A pure function of events.

Invariants:
- at most one pause at a time; a request is answered when each live task has reported that it runs no shared step;
- no pause begins while a step of a dead worker, or one that failed, may be applied on some tasks only; if a worker dies
  or a step fails before the pause is reached, these steps are done first, and the pause begins again;
- a pause ends by its task's request, or when that task leaves; a pause that a task has not kept, since it joined after
  the others had reported, ends as broken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, SendReply
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Notices, Received, Requests
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.snapshots.pause_messages import (
    HoldSteps,
    PauseSteps,
    ResumeSteps,
    StepsHeld,
    StepsPaused,
    StepsResumed,
)
from dflow.distributed.wire.handler_table import HandlerTable


class StepPauses(CoordinatorPart):
    """Pauses the shared steps of one cluster. Nothing is durable: a restart of the coordinator ends all pauses."""

    requests: ClassVar[Requests[StepPauses]] = HandlerTable()
    notices: ClassVar[Notices[StepPauses]] = HandlerTable()

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        #: From each part that knows of such steps, a function of the task that asks for a pause: whether no step of a
        #: dead worker, or one that failed, may be applied on some tasks only. Steps of the asking task do not count.
        self.is_clear: list[Callable[[str], bool]] = []
        #: The requests by task, in order of arrival; the first is that of the present pause, if there is one. None for
        #: those of the coordinator itself, which gives them names that no task has.
        self._requests: dict[str, int | None] = {}
        #: A request of the coordinator that does not wait until the steps of dead workers are done.
        self._urgent = ""
        self._number = 0
        self._waits_for: set[str] = set()
        #: Whether there is a pause, all tasks have reported in it, and a task has joined since.
        self.is_on = self._is_reached = self._is_broken = False

    @requests.handles(PauseSteps)
    def _pause(self, request: PauseSteps, received: Received) -> Sequence[Command]:
        return self.ask(request.task, received.ask)

    @requests.handles(ResumeSteps)
    def resume(self, request: ResumeSteps, received: Received) -> Sequence[Command]:
        """End the task's pause, or withdraw its request. Answer whether this pause was reached and not broken."""
        is_of_this = (request.task, request.number) == (self.first, self._number)
        were_paused = self._is_reached and not self._is_broken and is_of_this
        return [*self.withdraw(request.task), SendReply(received.ask, StepsResumed(were_paused))]

    @notices.handles(StepsHeld)
    def held(self, report: StepsHeld, received: Received) -> Sequence[Command]:
        """Wait no more for a task that reports that it runs no shared step in the present pause."""
        if report.number == self._number:
            self._waits_for.discard(report.task)
        return []

    def on_join(self, task: str, peer: int, is_known: bool, at_s: float) -> Sequence[Command]:
        """During a pause, have a task that joins or joins again hold its steps; a pause that was reached is broken."""
        if not self.is_on:
            return []
        self._is_broken = self._is_broken or self._is_reached
        self._waits_for.add(task)
        return [self._hold({task: peer})]

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> list[Command]:
        """Wait no more for tasks that have left; end their pauses, and withdraw their requests."""
        self._waits_for.difference_update(one.task for one in left)
        return [command for one in left for command in self.withdraw(one.task)]

    def after_event(self, at_s: float) -> Sequence[Command]:
        """Go on with the first request; see `go_on`."""
        if not self._requests:
            return []
        return self.go_on(all(is_clear(self.first) for is_clear in self.is_clear))

    @property
    def reached(self) -> str:
        """The task, or name of the coordinator's own (`TO_CAPTURE`), whose pause is reached; empty if none is."""
        return self.first if self._is_reached else ""

    @property
    def waits_for(self) -> frozenset[str]:
        """Tasks that have not yet reported `StepsHeld` for the present pause."""
        return frozenset(self._waits_for)

    @property
    def first(self) -> str:
        """The task, or name of the coordinator's own, of the present or next pause; empty if there is none."""
        return next(iter(self._requests), "")

    def has_request(self, task: str) -> bool:
        """Whether the task, or name of the coordinator's own, waits for a pause or is in one."""
        return task in self._requests

    def ask(self, task: str, ask: int | None = None, *, is_urgent: bool = False) -> list[Command]:
        """Queue a request for a pause; answer the same one again if its pause is reached. `go_on` must follow.

        task       the task, or a name of the coordinator's own
        ask        the request to answer; None for one of the coordinator's own
        is_urgent  whether it comes before the other requests, and does not wait until what dead workers left is done
        """
        self._requests[task] = ask
        if is_urgent:
            self._urgent = task
            if not self.is_on:
                self._requests = {task: ask, **self._requests}
        is_again = self._is_reached and task == self.first
        return [SendReply(ask, StepsPaused(self._number))] if is_again and ask is not None else []

    def go_on(self, is_clear: bool) -> list[Command]:
        """Begin the next pause, or answer the request for the present one when all tasks have reported.

        A pause that is not reached ends, to begin again later, if `is_clear` has become false.

        is_clear  whether no step of a dead worker, or one that failed, may be applied on some tasks only
        """
        commands: list[Command] = []
        is_clear = is_clear or self.first == self._urgent
        if self._requests and not self.is_on and is_clear:
            self._number += 1
            self.is_on, self._is_broken, self._waits_for = True, False, {*self._core.members.connections()}
            commands = [self._hold(self._core.members.connections())]
        elif self.is_on and not self._is_reached and not is_clear:
            return self._end()
        if self.is_on and not self._is_reached and not self._waits_for:
            self._is_reached = True
            if (ask := self._requests[self.first]) is not None:
                commands.append(SendReply(ask, StepsPaused(self._number)))
        return commands

    def remind(self) -> list[Command]:
        """Send HoldSteps again if the pause is not reached.

        A step may have begun to wait for a queue after the first message.
        """
        return [self._hold(self._core.members.connections())] if self.is_on and not self._is_reached else []

    def withdraw(self, task: str) -> list[Command]:
        """End the pause of a task, or withdraw its request for one. `go_on` must follow."""
        is_its_own = self.is_on and task == self.first
        self._requests.pop(task, None)
        return self._end() if is_its_own else []

    def _end(self) -> list[Command]:
        self.is_on = self._is_reached = False
        self._waits_for = set()
        if self._urgent in self._requests:
            self._requests = {self._urgent: self._requests.pop(self._urgent), **self._requests}
        return [_broadcast(self._core.members.connections(), HoldSteps(0))]

    def _hold(self, live: Mapping[str, int | None]) -> Broadcast:
        return _broadcast(live, HoldSteps(self._number, self.first == self._urgent))


def _broadcast(live: Mapping[str, int | None], message: HoldSteps) -> Broadcast:
    return Broadcast(tuple(peer for peer in live.values() if peer is not None), message)
