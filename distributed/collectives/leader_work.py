"""Work that the member of rank 0 does for its group, such as a file that it writes, and the members that wait for it.

The member of rank 0 does not wait for the others, so it may do a work that no other member asks for.

Invariants:
- a wait is answered exactly once: with the end of the work, or with an error that names the member of rank 0;
- a wait fails if the member of rank 0 has come to a later exchange without this work: it reports the begin of each work
  before the next exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dflow.distributed.collectives.group_messages import (
    AwaitLeaderWork,
    Exchange,
    JoinGroup,
    LeaderWork,
    LeaderWorkEnded,
    LeaderWorks,
)
from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.coordinator.coordinator_part import Received
from dflow.distributed.wire.messages.basic import Failure
from dflow.tracing.devices.task_name import short_task_name

Asked = TypeVar("Asked", AwaitLeaderWork, Exchange, JoinGroup)
#: Number of ended works that a group remembers, for members that come late.
MOST_ENDED = 1000


@dataclass(frozen=True)
class Waiting(Generic[Asked]):
    """A request of a member that is not answered yet."""

    request: Asked
    received: Received

    @property
    def until_s(self) -> float:
        """The end of the wait."""
        return self.received.at_s + self.request.timeout_s


@dataclass
class LeaderWorkBook:
    """The works of one group; `leader` is the task of rank 0."""

    leader: str
    _begun: set[LeaderWork] = field(default_factory=set)
    #: The ends of works, the newest last.
    _ended: dict[LeaderWork, LeaderWorkEnded] = field(default_factory=dict)
    _waiting: list[Waiting[AwaitLeaderWork]] = field(default_factory=list)
    #: Number of exchanges of its main thread that the leader has come to.
    _point: int = 0

    def note(self, told: LeaderWorks) -> list[SendReply]:
        """Note the begin or the end of a work."""
        if not told.has_ended:
            self._begun.add(told.work)
            return []
        self._begun.discard(told.work)
        ended = self._ended[told.work] = LeaderWorkEnded(told.kind, told.error)
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        return [SendReply(one.received.ask, ended) for one in self._take(lambda one: one.request.work == told.work)]

    def wait(self, member: Waiting[AwaitLeaderWork]) -> list[SendReply]:
        """Answer a member when the work has ended."""
        request = member.request
        if request.work in self._ended:
            return [SendReply(member.received.ask, self._ended[request.work])]
        self._waiting = [one for one in self._waiting if one.request != request]  # asked again over a new connection
        self._waiting.append(member)
        return self._refuse_passed()

    def come(self, task: str, point: int) -> list[SendReply]:
        """Note that a member's main thread has come to an exchange."""
        if task == self.leader:
            self._point = max(self._point, point)
        return self._refuse_passed()

    def expire(self, at_s: float) -> list[SendReply]:
        """End the waits that are past their deadlines."""
        late = self._take(lambda one: at_s >= one.until_s)
        return self._refuse(late, "DeadlineExceeded", "and it has not ended")

    def lose(self, why: str) -> list[SendReply]:
        """End all waits, since the group is over."""
        waiting, self._waiting = self._waiting, []
        return [SendReply(one.received.ask, Failure("TaskLost", why)) for one in waiting]

    def _refuse_passed(self) -> list[SendReply]:
        passed = self._take(lambda one: one.request.work.point < self._point and one.request.work not in self._begun)
        return self._refuse(passed, "StrategyError", "which has gone on without it")

    def _refuse(self, waiters: Sequence[Waiting[AwaitLeaderWork]], kind: str, why: str) -> list[SendReply]:
        return [SendReply(one.received.ask, Failure(kind, self._refusal(one, why))) for one in waiters]

    def _refusal(self, one: Waiting[AwaitLeaderWork], why: str) -> str:
        leader = short_task_name(self.leader)
        return (
            f"{short_task_name(one.request.task)} waits for {one.request.work.name} by {leader}, {why}\n"
            f"  call it on all workers, or on {leader} alone"
        )

    def _take(self, is_taken: Callable[[Waiting[AwaitLeaderWork]], bool]) -> list[Waiting[AwaitLeaderWork]]:
        taken = [one for one in self._waiting if is_taken(one)]
        self._waiting = [one for one in self._waiting if not is_taken(one)]
        return taken
