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

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.wire.messages.barriers import AwaitBarrier, BarrierPassed
from dflow.distributed.wire.messages.connection import Failure
from dflow.tracing.devices.task_name import short_task_name

#: The tasks of a job that are live or expected now, and the roster's version.
Present = Callable[[str], tuple[tuple[str, ...], int]]
#: Description of a task at a time, for an error.
Describe = Callable[[str, float], str]


@dataclass(frozen=True)
class _BarrierArrival:
    """An arrival that waits; `life` distinguishes tasks of the same name, `ask` is the request to answer."""

    ask: int
    life: int
    number: int
    timeout_s: float
    until_s: float
    fails_on_leave: bool


class _Generation(msgspec.Struct, frozen=True):
    """The remaining members of a generation, and the version of the roster that they were taken from."""

    number: int
    version: int
    members: tuple[str, ...]


class _Passed(msgspec.Struct, frozen=True):
    """The last generation that passed, and the life and number of each arrival by task."""

    generation: _Generation
    arrivals: dict[str, tuple[int, int]]


class _Record(msgspec.Struct, frozen=True):
    """The durable part of a barrier: `generation` has no members when none is open; `until_s` is the last deadline."""

    generation: _Generation
    passed: _Passed
    until_s: float = 0.0


class _Forgotten(msgspec.Struct, frozen=True):
    """The greatest generation number of all forgotten barriers."""

    number: int = 0


_NONE = _Generation(0, 0, ())


@dataclass
class _Barrier:
    """A barrier: its durable part, the arrivals of its members (`here`), and those for the next generation (`late`)."""

    generation: _Generation = _NONE
    passed: _Passed = field(default_factory=lambda: _Passed(_NONE, {}))
    until_s: float = 0.0
    job: str = ""
    here: dict[str, _BarrierArrival] = field(default_factory=dict)
    late: dict[str, _BarrierArrival] = field(default_factory=dict)

    def missing(self) -> tuple[str, ...]:
        """Return the members that have not arrived."""
        return tuple(task for task in self.generation.members if task not in self.here)

    def is_over(self, at_s: float) -> bool:
        """Whether no task waits, and none can repeat an arrival."""
        return not self.here and not self.late and at_s >= self.until_s + ASKED_AGAIN_S


class Barriers:
    """The barriers of one cluster, kept in `records`."""

    def __init__(self, present: Present, describe: Describe, records: DurableRecords) -> None:
        self._present = present
        self._describe = describe
        self._records = records
        self._barriers = {
            name: _Barrier(record.generation, record.passed, record.until_s)
            for name, record in self._records.load(_BARRIER, _Record)
        }
        self._forgotten = records.load_one(_FORGOTTEN, _Forgotten()).number

    def arrive(self, at_s: float, ask: int, life: int, request: AwaitBarrier, job: str) -> list[SendReply]:
        """Record the arrival of a live task of `job` at a barrier."""
        name, task = request.name, request.task
        barrier = self._barriers.setdefault(name, _Barrier(_Generation(self._forgotten, 0, ())))
        barrier.job = job
        if barrier.passed.arrivals.get(task) == (life, request.number):
            return [SendReply(ask, _answer(barrier.passed.generation))]
        replies = self._overtake(barrier, task, request)
        until_s = at_s + request.timeout_s
        barrier.until_s = max(barrier.until_s, until_s)
        arrival = _BarrierArrival(ask, life, request.number, request.timeout_s, until_s, request.fails_on_leave)
        if not barrier.generation.members:
            self._open(name, barrier)
        (barrier.here if task in barrier.generation.members else barrier.late)[task] = arrival
        return replies + self._pass_if_complete(name, barrier)

    def leave(self, task: str, why: str) -> list[SendReply]:
        """Remove a task that left the cluster; `why` is a sentence for the errors."""
        return [reply for name, barrier in self._barriers.items() for reply in self._leave(name, barrier, task, why)]

    def tick(self, at_s: float) -> list[SendReply]:
        """Fail all arrivals past their deadline, and forget the barriers that are over."""
        replies = [reply for name, barrier in self._barriers.items() for reply in self._expire(name, barrier, at_s)]
        for name in [name for name, barrier in self._barriers.items() if barrier.is_over(at_s)]:
            self._forget(name)
        return replies

    def waiting(self) -> dict[str, tuple[str, ...]]:
        """Return the waiting tasks by the name of the barrier."""
        return {name: (*barrier.here, *barrier.late) for name, barrier in self._barriers.items() if barrier.here}

    def _overtake(self, barrier: _Barrier, task: str, request: AwaitBarrier) -> list[SendReply]:
        """Refuse the task's waiting arrival, since a later one came."""
        waits = barrier.here.pop(task, None) or barrier.late.pop(task, None)
        if waits is None:
            return []
        text = f"{short_task_name(task)} has come to barrier {request.name!r} again"
        return [SendReply(waits.ask, Failure("RemoteError", text))]

    def _open(self, name: str, barrier: _Barrier) -> None:
        members, version = self._present(barrier.job)
        self._set(name, barrier, _Generation(barrier.generation.number + 1, version, members))
        for task in [task for task in barrier.late if task in members]:
            barrier.here[task] = barrier.late.pop(task)

    def _pass_if_complete(self, name: str, barrier: _Barrier) -> list[SendReply]:
        replies: list[SendReply] = []
        # A loop, since late arrivals may complete the next generation immediately.
        while barrier.generation.members and len(barrier.here) == len(barrier.generation.members):
            arrivals, barrier.here = barrier.here, {}
            replies += [SendReply(arrival.ask, _answer(barrier.generation)) for arrival in arrivals.values()]
            numbers = {task: (arrival.life, arrival.number) for task, arrival in arrivals.items()}
            barrier.passed = _Passed(barrier.generation, numbers)
            self._close(name, barrier)
        return replies

    def _close(self, name: str, barrier: _Barrier) -> None:
        """End the generation, since no task waits in it; the late arrivals begin the next."""
        self._set(name, barrier, msgspec.structs.replace(barrier.generation, members=()))
        if barrier.late:
            self._open(name, barrier)

    def _leave(self, name: str, barrier: _Barrier, task: str, why: str) -> list[SendReply]:
        replies: list[SendReply] = []
        waits = barrier.here.pop(task, None) or barrier.late.pop(task, None)
        if waits is not None:
            replies.append(SendReply(waits.ask, Failure("TaskLost", why)))
        members = barrier.generation.members
        if task not in members:
            return replies
        if any(arrival.fails_on_leave for arrival in barrier.here.values()):
            failure = Failure("TaskLost", f"barrier {name!r} has failed, since a member is lost: {why}")
            replies += [SendReply(arrival.ask, failure) for arrival in barrier.here.values()]
            barrier.here = {}
            self._close(name, barrier)
        else:
            rest = tuple(member for member in members if member != task)
            self._set(name, barrier, msgspec.structs.replace(barrier.generation, members=rest))
            if not rest and barrier.late:
                self._open(name, barrier)
        return replies + self._pass_if_complete(name, barrier)

    def _expire(self, name: str, barrier: _Barrier, at_s: float) -> list[SendReply]:
        late = [task for task, arrival in (barrier.here | barrier.late).items() if at_s >= arrival.until_s]
        if not late:
            return []
        missing = barrier.missing()
        who = ", ".join(self._describe(task, at_s) for task in missing[:MOST_NAMED])
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        count = len(barrier.generation.members)
        replies = []
        for task in late:
            is_member = task in barrier.here
            arrival = barrier.here.pop(task, None) or barrier.late.pop(task)
            since = "" if is_member else ", which had begun before it joined,"
            text = (
                f"{short_task_name(task)} waited {arrival.timeout_s:g} s at barrier {name!r}{since} for "
                f"{len(missing)} of {count} tasks: {who}{more}"
            )
            replies.append(SendReply(arrival.ask, Failure("DeadlineExceeded", text)))
        if not barrier.here:
            self._close(name, barrier)
        return replies + self._pass_if_complete(name, barrier)

    def _set(self, name: str, barrier: _Barrier, generation: _Generation) -> None:
        barrier.generation = generation
        self._records.put(_BARRIER + name, _Record(generation, barrier.passed, barrier.until_s))

    def _forget(self, name: str) -> None:
        self._forgotten = max(self._forgotten, self._barriers.pop(name).generation.number)
        self._records.drop(_BARRIER + name)
        self._records.put(_FORGOTTEN, _Forgotten(self._forgotten))


def _answer(generation: _Generation) -> BarrierPassed:
    return BarrierPassed(generation.number, generation.version, generation.members)


#: An error names at most this many missing tasks.
MOST_NAMED = 20
#: A task may repeat an arrival, over another connection, until this long after its timeout, in s.
ASKED_AGAIN_S = 60.0
_BARRIER = "barrier/"
_FORGOTTEN = "barriers forgotten"
