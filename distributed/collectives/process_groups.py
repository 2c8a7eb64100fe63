"""Groups of processes that run one program together, as training by collectives does: how they form, and what they
tell each other.

A group is all tasks of a job, each in one life. It forms when all that are live or expected have asked; a task that
left by a fault is waited for too, for a while, and then the group forms without it. Once formed, a group never changes:
when a member leaves it is over, and its other members ask for the next one in their next lives.

The members of a group exchange words: each gives one at a point of the program, and gets those of all when every
member has come there.

Invariants:
- a life is a member of at most one group, and all members get the same answer;
- a request is answered exactly once: with the words of all, or with an error that names the tasks that are missing,
  have left, or have come to another point of the program;
- no member passes an exchange before all have come there, and no exchange is passed after a member has left;
- an exchange fails if its missing members wait for the other members, at a barrier or at the end of the program;
- a group does not outlive its coordinator's process, and its members are notified;
- the member of rank 0 does works for its group, such as a file that it writes, without a wait for the others. A wait
  for such a work is answered exactly once. It fails if that member has come to a later exchange without this work: it
  reports the begin of each work before the next exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Generic, TypeVar

from dflow.distributed.collectives.group_messages import (
    END,
    MAIN,
    AwaitLeaderWork,
    Exchange,
    Exchanged,
    GroupFormed,
    JoinGroup,
    LeaderWork,
    LeaderWorkEnded,
    LeaderWorks,
)
from dflow.distributed.coordinator.barriers import Barriers
from dflow.distributed.coordinator.coordinator_events import Command, Log, SendReply
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Received, Requests
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.coordinator.progress_watch import ProgressWatch
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.tracing.devices.task_name import short_task_name, split_task_name

Asked = TypeVar("Asked", AwaitLeaderWork, Exchange, JoinGroup)
#: Number of ended works that a group remembers, for members that come late.
MOST_ENDED = 1000
#: Longest wait of a new group for the next life of a task after a fault, in s.
RETURN_S = 60.0
#: An exchange that lasts longer is logged once, with the missing tasks, in s.
LONG_EXCHANGE_S = 10.0


@dataclass(frozen=True)
class Waiting(Generic[Asked]):
    """A request of a member that is not answered yet."""

    request: Asked
    received: Received

    @property
    def until_s(self) -> float:
        """Deadline of the request, in s, by the coordinator's clock."""
        return self.received.at_s + self.request.timeout_s


@dataclass
class _Channel:
    """The exchanges of one thread of the program.

    number        number of the last complete exchange, and `words` its words by rank
    given         requests of the open exchange, by task
    began_s       time of the first of them, in s
    is_announced  whether the open exchange was logged, as it lasts long
    """

    number: int = 0
    words: tuple[str, ...] = ()
    given: dict[str, Waiting[Exchange]] = field(default_factory=dict)
    began_s: float = 0.0
    is_announced: bool = False


@dataclass
class _Group:
    """A group, from its beginning until all its members have left.

    members   life of each member, by task, in the order of their ranks
    lost      sentence about the first member that left; empty while there is none
    channels  the exchanges of the group, by channel
    """

    members: dict[str, int]
    lost: str = ""
    channels: dict[str, _Channel] = field(default_factory=dict)
    #: The works that the member of rank 0 does for all: works that have begun, and the ends of others, the newest last.
    _begun: set[LeaderWork] = field(default_factory=set)
    _ended: dict[LeaderWork, LeaderWorkEnded] = field(default_factory=dict)
    _waiting: list[Waiting[AwaitLeaderWork]] = field(default_factory=list)
    #: Number of exchanges of its main thread that the member of rank 0 has come to.
    _point: int = 0

    @property
    def _leader(self) -> str:
        """The task of rank 0."""
        return next(iter(self.members))

    @property
    def described_end(self) -> str:
        """Sentence for errors: the group is over, and why."""
        return f"the group of {', '.join(map(short_task_name, self.members))} is over: {self.lost}"

    @property
    def formed(self) -> GroupFormed:
        """The answer to each member's `JoinGroup`."""
        return GroupFormed(tuple(self.members), tuple(self.members.values()))

    # Works of the member of rank 0.

    def note_work(self, told: LeaderWorks) -> list[SendReply]:
        """Record the begin or the end of a work of rank 0; at its end, answer the members that wait for it."""
        if not told.has_ended:
            self._begun.add(told.work)
            return []
        self._begun.discard(told.work)
        ended = self._ended[told.work] = LeaderWorkEnded(told.kind, told.error)
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        return [SendReply(one.received.ask, ended) for one in self._take(lambda one: one.request.work == told.work)]

    def await_work(self, member: Waiting[AwaitLeaderWork]) -> list[SendReply]:
        """Answer the member if rank 0 has ended the work, else keep the request until then.

        Refuses each waiting request for a work that rank 0 has passed without it.
        """
        request = member.request
        if request.work in self._ended:
            return [SendReply(member.received.ask, self._ended[request.work])]
        self._waiting = [one for one in self._waiting if one.request != request]  # asked again over a new connection
        self._waiting.append(member)
        return self._refuse_passed()

    def come(self, task: str, point: int) -> list[SendReply]:
        """Record the exchange that rank 0's main thread has come to; refuse waits for works that it has passed.

        Other members' exchanges change nothing.
        """
        if task == self._leader:
            self._point = max(self._point, point)
        return self._refuse_passed()

    def expire(self, at_s: float) -> list[SendReply]:
        """Refuse the members that have waited too long for a work of rank 0, with DeadlineExceeded."""
        late = self._take(lambda one: at_s >= one.until_s)
        return self._refuse(late, "DeadlineExceeded", "and it has not ended")

    def lose(self, why: str) -> list[SendReply]:
        """Refuse all members that wait for a work of rank 0, with TaskLost; `why` is the text."""
        waiting, self._waiting = self._waiting, []
        return [SendReply(one.received.ask, Failure("TaskLost", why)) for one in waiting]

    def _refuse_passed(self) -> list[SendReply]:
        passed = self._take(lambda one: one.request.work.point < self._point and one.request.work not in self._begun)
        return self._refuse(passed, "StrategyError", "which has gone on without it")

    def _refuse(self, waiters: Sequence[Waiting[AwaitLeaderWork]], kind: str, why: str) -> list[SendReply]:
        return [SendReply(one.received.ask, Failure(kind, self._refusal(one, why))) for one in waiters]

    def _refusal(self, one: Waiting[AwaitLeaderWork], why: str) -> str:
        leader = short_task_name(self._leader)
        return (
            f"{short_task_name(one.request.task)} waits for {one.request.work.name} by {leader}, {why}\n"
            f"  call it on all workers, or on {leader} alone"
        )

    def _take(self, is_taken: Callable[[Waiting[AwaitLeaderWork]], bool]) -> list[Waiting[AwaitLeaderWork]]:
        taken = [one for one in self._waiting if is_taken(one)]
        self._waiting = [one for one in self._waiting if not is_taken(one)]
        return taken


class ProcessGroups(CoordinatorPart):
    """The groups of one cluster."""

    requests: ClassVar[Requests[ProcessGroups]] = HandlerTable()

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        #: Returns the tasks to wait for when a group of a job forms, at a time: live, expected, or expected back.
        self._expected = partial(core.members.coming, within_s=RETURN_S)
        self._describe, self._at_barrier = core.part(ProgressWatch).describe, core.part(Barriers).waiting_at
        #: By job, the tasks that wait for a group.
        self._waiting: dict[str, dict[str, Waiting[JoinGroup]]] = {}
        #: By life of a member.
        self._groups: dict[int, _Group] = {}

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> list[Command]:
        """End the groups of tasks that have left, and form groups that wait for no task any longer: see `leave`."""
        return [reply for one in left for reply in self.leave(at_s, one.task, one.life, one.described)]

    @requests.handles(JoinGroup)
    def join(self, request: JoinGroup, received: Received) -> Sequence[Command]:
        """Record that a task asks for a group; form the group and answer all its tasks when no task is missing."""
        if received.life in self._groups:  # the answer was lost with a connection
            return [SendReply(received.ask, self._groups[received.life].formed)]
        job, _ = split_task_name(request.task)
        self._waiting.setdefault(job, {})[request.task] = Waiting(request, received)
        return self._form(job, received.at_s)

    @requests.handles(Exchange)
    def exchange(self, request: Exchange, received: Received) -> Sequence[Command]:
        """Record the word of a member; answer all members when no word is missing.

        Refuses the request if the group is over, and all waiting ones if the members are at different points.
        """
        group = self._going_on(received.life, request.task)
        if isinstance(group, Failure):
            return [SendReply(received.ask, group)]
        passed = group.come(request.task, request.number) if request.channel == MAIN else []
        return passed + self._exchange(group, request, received)

    @requests.handles(AwaitLeaderWork)
    def await_work(self, request: AwaitLeaderWork, received: Received) -> Sequence[Command]:
        """Answer a member when rank 0 of its group has ended the work.

        Refuses it if the group is over, or if rank 0 went on without that work.
        """
        group = self._going_on(received.life, request.task)
        if isinstance(group, Failure):
            return [SendReply(received.ask, group)]
        return group.await_work(Waiting(request, received))

    @requests.handles(LeaderWorks)
    def note_work(self, told: LeaderWorks, received: Received) -> Sequence[Command]:
        """Record that a member of rank 0 has begun or ended a work; answer it and the members that wait for the end."""
        group = self._groups.get(received.life)
        return [*(group.note_work(told) if group is not None else []), SendReply(received.ask, Ok())]

    def _going_on(self, life: int, task: str) -> _Group | Failure:
        """Return the group of a life, or a TaskLost failure if the group is over or unknown."""
        group = self._groups.get(life)
        if group is not None and not group.lost:
            return group
        why = group.lost if group is not None else "the coordinator was started again, and knows it no longer"
        return Failure("TaskLost", f"the group of {short_task_name(task)} is over: {why}")

    def _exchange(self, group: _Group, request: Exchange, received: Received) -> list[SendReply]:
        channel = group.channels.setdefault(request.channel, _Channel())
        if request.number == channel.number:  # the answer was lost with a connection
            return [SendReply(received.ask, Exchanged(channel.words))]
        if not channel.given:
            channel.began_s, channel.is_announced = received.at_s, False
        channel.given[request.task] = Waiting(request, received)
        if len({one.request.name for one in channel.given.values()}) > 1:
            return _refuse(channel, "StrategyError", _apart(channel))
        if len(channel.given) < len(group.members):
            return []
        channel.number, channel.words = request.number, tuple(channel.given[one].request.word for one in group.members)
        answers = [SendReply(one.received.ask, Exchanged(channel.words)) for one in channel.given.values()]
        channel.given.clear()
        return answers

    def leave(self, at_s: float, task: str, life: int, why: str) -> list[SendReply]:
        """Remove a task that left, and end the group of its life: its waiting members are refused with TaskLost.

        Also forms the next group of its job, if that waits for no task any longer. `why` is a sentence for the errors.
        """
        job, _ = split_task_name(task)
        self._waiting.get(job, {}).pop(task, None)
        replies = self._form(job, at_s)
        group = self._groups.get(life)
        if group is None:
            return replies
        group.lost = group.lost or why
        del self._groups[life]
        for channel in group.channels.values():
            channel.given.pop(task, None)
            replies += _refuse(channel, "TaskLost", group.described_end)
        return replies + group.lose(group.described_end)

    def on_tick(self, at_s: float) -> list[Command]:
        """Form the groups that wait for no task any longer, and refuse the requests that are past their deadlines.

        Logs an exchange after `LONG_EXCHANGE_S`, or refuses it if its missing members wait elsewhere.
        """
        commands: list[Command] = []
        for job, waiting in self._waiting.items():
            commands += self._form(job, at_s)
            late = [task for task, applicant in waiting.items() if at_s >= applicant.until_s]
            missing = self._named(set(self._expected(job, at_s)) - set(waiting), at_s) if late else ""
            for task in late:
                applicant = waiting.pop(task)
                waited = f"{short_task_name(task)} waited {applicant.request.timeout_s:g} s for its group to form"
                remedy = "start what is missing, and have each call dflow.connect(collectives=True)"
                failure = Failure("DeadlineExceeded", f"{waited}; missing: {missing}\n  {remedy}")
                commands.append(SendReply(applicant.received.ask, failure))
        for group in {id(group): group for group in self._groups.values()}.values():
            for channel in group.channels.values():
                commands += self._expire(group, channel, at_s)
            commands += group.expire(at_s)
        return commands

    def _expire(self, group: _Group, channel: _Channel, at_s: float) -> list[Command]:
        if not channel.given or (at_s - channel.began_s < LONG_EXCHANGE_S and not _is_late(channel, at_s)):
            return []
        name = next(iter(channel.given.values())).request.name
        if elsewhere := self._elsewhere(group, channel):
            return [*_refuse(channel, "StrategyError", _apart(channel, elsewhere))]
        missing = self._named(set(group.members) - set(channel.given), at_s)
        here = ", ".join(map(short_task_name, channel.given))
        text = f"{here} waited {at_s - channel.began_s:.1f} s at {name} for {missing}"
        if _is_late(channel, at_s):
            return [*_refuse(channel, "DeadlineExceeded", text)]
        was_announced, channel.is_announced = channel.is_announced, True
        return [] if was_announced else [Log(text)]

    def _elsewhere(self, group: _Group, channel: _Channel) -> dict[str, str]:
        """Return where each missing member waits, if none of them can come; else nothing."""
        main = group.channels.get(MAIN, _Channel())
        found: dict[str, str] = {}
        for task in set(group.members) - set(channel.given):
            barrier = self._at_barrier(task) if channel is main else None
            if task in main.given and main.given[task].request.name == END:
                found[task] = END
            elif barrier is not None and not barrier[1].isdisjoint(channel.given):
                found[task] = f"barrier {barrier[0]!r}"
            else:
                return {}
        return found

    def _form(self, job: str, at_s: float) -> list[SendReply]:
        """Form the group of a job, and answer its tasks, if all expected ones have asked; return the answers."""
        waiting = self._waiting.get(job, {})
        if not waiting or not waiting.keys() >= set(self._expected(job, at_s)):
            return []
        group = _Group({task: waiting[task].received.life for task in sorted(waiting, key=split_task_name)})
        self._groups.update(dict.fromkeys(group.members.values(), group))
        answers = [SendReply(applicant.received.ask, group.formed) for applicant in waiting.values()]
        waiting.clear()
        return answers

    def _named(self, tasks: Iterable[str], at_s: float) -> str:
        return ", ".join(self._describe(task, at_s) for task in sorted(tasks, key=split_task_name))


def _is_late(channel: _Channel, at_s: float) -> bool:
    return any(at_s >= given.until_s for given in channel.given.values())


def _apart(channel: _Channel, elsewhere: Mapping[str, str] = {}) -> str:
    """Describe members that are at different points of the program; `elsewhere` has those that wait elsewhere."""
    here = {task: given.request.name for task, given in channel.given.items()} | dict(elsewhere)
    described = ", ".join(f"{short_task_name(task)} at {name}" for task, name in here.items())
    return (
        f"the processes of a group are at different points of the program: {described}\n"
        "  let every worker make the same calls in the same order, and run loops of the same number of steps"
    )


def _refuse(channel: _Channel, kind: str, text: str) -> list[SendReply]:
    given = [*channel.given.values()]
    channel.given.clear()
    return [SendReply(one.received.ask, Failure(kind, text)) for one in given]
