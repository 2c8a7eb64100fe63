"""Barriers at which tasks wait for each other: the first arrival opens one, and all its members pass it together.

A barrier has a name and can pass repeatedly; each pass is a generation. Its members are the tasks of one job that are
live or expected when it opens. A task that joins later waits for the next generation. The barrier goes on without a
member that leaves, or fails if an arrival asked for that.

Invariants:
- the members of a generation are decided once: all tasks that pass it get the same answer, even when the coordinator
  dies meanwhile, and none passes before each member has arrived or left;
- an arrival is answered exactly once: passed, too late, replaced by a later arrival of its task, or failed; a repeated
  arrival gets the same answer, as long as its task has not arrived again;
- no arrival waits longer than its timeout, and its error then names the missing tasks;
- a generation ends when no task waits in it;
- a barrier is forgotten once no task can repeat an arrival, so that a program may use any number of names; the number
  of a generation is greater than those of all earlier generations under its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from dflow.distributed.coordinator.coordinator_events import Command, SendReply
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Received, Requests
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.coordinator.progress_watch import ProgressWatch
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.coordination import AwaitBarrier, BarrierPassed
from dflow.tracing.devices.task_name import short_task_name, split_task_name


@dataclass(frozen=True)
class _BarrierArrival:
    """An arrival that waits until `until_s`; `life` is that of its task, `ask` the request to answer."""

    ask: int
    life: int
    request: AwaitBarrier
    until_s: float


class _Generation(msgspec.Struct, frozen=True):
    """A pass of a barrier: its remaining members, none once it has ended, and the roster's version when it opened."""

    number: int = 0
    version: int = 0
    members: tuple[str, ...] = ()


class _Passed(msgspec.Struct, frozen=True):
    """The last generation that passed, and by task the life and the request number of its arrival."""

    generation: _Generation = _Generation()
    arrivals: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class _Record(msgspec.Struct, frozen=True):
    """The durable part of a barrier: its newest generation, the last that passed, and the latest deadline."""

    generation: _Generation
    passed: _Passed
    until_s: float = 0.0


@dataclass
class _Barrier:
    """A barrier: its durable part, and the arrivals that wait by task, for this generation or for the next."""

    name: str
    job: str
    generation: _Generation
    passed: _Passed = field(default_factory=_Passed)
    until_s: float = 0.0
    waiting: dict[str, _BarrierArrival] = field(default_factory=dict)

    def here(self) -> list[str]:
        """Return the members that have arrived, in the order of their arrivals."""
        members = frozenset(self.generation.members)
        return [task for task in self.waiting if task in members]

    def missing(self) -> list[str]:
        """Return the members that have not arrived."""
        return [task for task in self.generation.members if task not in self.waiting]

    def is_complete(self) -> bool:
        """Whether it has members, and all have arrived."""
        members = self.generation.members
        # Each arrival asks, so the members are looked at only once as many tasks wait.
        return 0 < len(members) <= len(self.waiting) and not self.missing()

    def is_over(self, at_s: float) -> bool:
        """Whether no task waits, and none can repeat an arrival."""
        return not self.waiting and at_s >= self.until_s + ASKED_AGAIN_S


class Barriers(CoordinatorPart):
    """The barriers of one cluster, kept in its records."""

    requests: ClassVar[Requests[Barriers]] = HandlerTable()

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        self._members, self._records = core.members, core.records
        self._describe = core.part(ProgressWatch).describe
        self._barriers = {
            name: _Barrier(name, "", record.generation, record.passed, record.until_s)
            for name, record in self._records.load(_BARRIER, _Record)
        }
        #: The greatest generation number of all forgotten barriers; a name that is used again counts on from it.
        self._forgotten = self._records.load_one(_FORGOTTEN, {"number": 0})["number"]

    @requests.handles(AwaitBarrier)
    def arrive(self, request: AwaitBarrier, received: Received) -> list[SendReply]:
        """Record the arrival of a live task at a barrier: it may open the barrier, or pass it.

        A repeated arrival at a passed barrier gets the same answer. An earlier arrival of the task that still waits is
        refused with RemoteError.
        """
        name, task, life = request.name, request.task, received.life
        job, _ = split_task_name(task)
        barrier = self._barriers.setdefault(name, _Barrier(name, job, _Generation(self._forgotten)))
        barrier.job = job
        if barrier.passed.arrivals.get(task) == (life, request.number):
            return [SendReply(received.ask, _answer(barrier.passed.generation))]
        again = Failure("RemoteError", f"{short_task_name(task)} has come to barrier {name!r} again")
        replies = _refuse(barrier, [task], again)
        until_s = received.at_s + request.timeout_s
        barrier.until_s = max(barrier.until_s, until_s)
        if not barrier.generation.members:
            self._open(barrier)
        barrier.waiting[task] = _BarrierArrival(received.ask, life, request, until_s)
        return replies + self._pass_if_complete(barrier)

    def waiting_at(self, task: str) -> tuple[str, frozenset[str]] | None:
        """Return the barrier at which a task waits, and the tasks that are missing there; None if it waits at none."""
        found = next((barrier for barrier in self._barriers.values() if task in barrier.waiting), None)
        return None if found is None else (found.name, frozenset(found.missing()))

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> list[Command]:
        """Remove the tasks that left from all barriers; their own arrivals fail with TaskLost.

        A barrier where it was missing may pass. A barrier where a member waits with `fails_on_leave` fails: all members
        there get TaskLost.
        """
        at = [(barrier, one) for one in left for barrier in self._barriers.values()]
        return [reply for barrier, one in at for reply in self._leave(barrier, one.task, one.described)]

    def on_tick(self, at_s: float) -> list[SendReply]:
        """Fail all arrivals past their deadline with DeadlineExceeded, and forget the barriers that are over."""
        replies = [reply for barrier in self._barriers.values() for reply in self._expire(barrier, at_s)]
        for name in [name for name, barrier in self._barriers.items() if barrier.is_over(at_s)]:
            self._forget(name)
        return replies

    def _open(self, barrier: _Barrier) -> None:
        members = self._members.by_job().get(barrier.job, ())
        self._set(barrier, _Generation(barrier.generation.number + 1, self._members.version, members))

    def _pass_if_complete(self, barrier: _Barrier) -> list[SendReply]:
        replies: list[SendReply] = []
        # A loop, since late arrivals may complete the next generation immediately.
        while barrier.is_complete():
            arrivals = {task: barrier.waiting.pop(task) for task in barrier.here()}
            replies += [SendReply(arrival.ask, _answer(barrier.generation)) for arrival in arrivals.values()]
            numbers = {task: (arrival.life, arrival.request.number) for task, arrival in arrivals.items()}
            barrier.passed = _Passed(barrier.generation, numbers)
            self._close(barrier)
        return replies

    def _close(self, barrier: _Barrier) -> None:
        """End the generation, since no task waits in it; open the next one if late arrivals wait."""
        self._set(barrier, msgspec.structs.replace(barrier.generation, members=()))
        if barrier.waiting:
            self._open(barrier)

    def _leave(self, barrier: _Barrier, task: str, why: str) -> list[SendReply]:
        replies = _refuse(barrier, [task], Failure("TaskLost", why))
        members = barrier.generation.members
        if task not in members:
            return replies
        here = barrier.here()
        if any(barrier.waiting[other].request.fails_on_leave for other in here):
            text = f"barrier {barrier.name!r} has failed, since a member is lost: {why}"
            replies += _refuse(barrier, here, Failure("TaskLost", text))
            self._close(barrier)
        else:
            rest = tuple(member for member in members if member != task)
            self._set(barrier, msgspec.structs.replace(barrier.generation, members=rest))
            if not rest and barrier.waiting:
                self._open(barrier)
        return replies + self._pass_if_complete(barrier)

    def _expire(self, barrier: _Barrier, at_s: float) -> list[SendReply]:
        late = [task for task, arrival in barrier.waiting.items() if at_s >= arrival.until_s]
        if not late:
            return []
        missing, members = barrier.missing(), barrier.generation.members
        named = ", ".join(self._describe(task, at_s) for task in missing[:MOST_NAMED])
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        replies = []
        for task in late:
            since = "" if task in members else ", which had begun before it joined,"
            text = (
                f"{short_task_name(task)} waited {barrier.waiting[task].request.timeout_s:g} s at barrier "
                f"{barrier.name!r}{since} for {len(missing)} of {len(members)} tasks: {named}{more}"
            )
            replies += _refuse(barrier, [task], Failure("DeadlineExceeded", text))
        if not barrier.here():
            self._close(barrier)
        return replies + self._pass_if_complete(barrier)

    def _set(self, barrier: _Barrier, generation: _Generation) -> None:
        barrier.generation = generation
        self._records.put(_BARRIER + barrier.name, _Record(generation, barrier.passed, barrier.until_s))

    def _forget(self, name: str) -> None:
        self._forgotten = max(self._forgotten, self._barriers.pop(name).generation.number)
        self._records.drop(_BARRIER + name)
        self._records.put(_FORGOTTEN, {"number": self._forgotten})


def _refuse(barrier: _Barrier, tasks: Iterable[str], failure: Failure) -> list[SendReply]:
    """Answer those of the tasks that wait at the barrier with the failure; they wait no longer."""
    return [SendReply(barrier.waiting.pop(task).ask, failure) for task in tasks if task in barrier.waiting]


def _answer(generation: _Generation) -> BarrierPassed:
    return BarrierPassed(generation.number, generation.version, generation.members)


#: An error names at most this many missing tasks.
MOST_NAMED = 20
#: A task may repeat an arrival, over another connection, until this long after its timeout, in s.
ASKED_AGAIN_S = 60.0
_BARRIER = "barrier/"
_FORGOTTEN = "barriers forgotten"
