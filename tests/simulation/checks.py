"""Invariants of a simulated schedule, checked after each event and at its end.

By the names that a report gives them:
- `applied once`     a process of a task applies a step at most once, whichever attempts at it there are;
- `bounded staleness` between a step's read on a ps and its update there, at most as many updates by other steps come as
                     the run allows;
- `done once`        the coordinator never hands out a step that is done, or that another live worker holds;
- `none lost`        a step counts as done only if it was applied on every ps, and all steps of the run are done at its
                     end. If there are several attempts at a step, at most one is reported; the workers of the others
                     died, left or saw the attempt fail. Such a step that was applied is listed by `repeated`;
- `waits end`        every wait ends by its deadline;
- `one of a name`    a roster lists at most one live task of each name;
- `holder kept`      no task learns that a holder has left, unless its process has ended, or the coordinator has heard
                     nothing from it for `HOLDER_S`;
- `rosters in order` a process never gets an older roster after a newer one;
- `one view`         all tasks that pass a barrier together get the same list of members, which contains them, and all
                     of these have arrived;
- `one in office`    no worker is elected while the worker elected before is live;
- `heard once`       a frame sent over a connection is received once and in order, over any number of streams;
- `nothing left`     when all steps have ended, no task holds a value, a wait, a step or a running plan;
- `nothing raises`   no process raises an error that it does not handle;
- `bounded`          the memory of tasks and of the coordinator's log stays below its limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dflow.distributed.coordinator.membership import NORMAL_ENDS
from dflow.distributed.steps.rendezvous import WINDOW
from dflow.distributed.task.task_server import TaskStatistics
from dflow.distributed.wire.messages.coordination import BarrierPassed
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from dflow.tracing.devices.task_name import task_name

#: Reports on one invariant: whether it holds, its name, and the description of the violation.
Require = Callable[[bool, str, str], None]

#: The coordinator's `holder_timeout_s`, which some outages exceed.
HOLDER_S = 18.0
#: Most time that a wait may last beyond its deadline: a process may be slow, or hang.
SLACK_S = 45.0


def name_of(process: str) -> str:
    """Return the task name of a process such as `worker:0`, or `worker:0'2` in its third life."""
    job, _, index = process.partition("'")[0].partition(":")
    return task_name(job, int(index))


@dataclass
class Attempt:
    """One worker's attempt at one step of the run. `ended` says why it ended unreported; empty if it did not.

    read  by ps, the number of updates before the read
    """

    number: int
    step: int
    worker: str
    read: Mapping[str, int] = field(default_factory=dict)
    applied_on: list[str] = field(default_factory=list)
    reported: bool = False
    ended: str = ""


@dataclass(frozen=True)
class Repeated:
    """A step tried again after an unreported attempt had been applied, with the reason why each of these ended."""

    step: int
    reasons: tuple[str, ...]


class Checks:
    """The checks of one schedule, called on its events."""

    def __init__(self, tasks: Iterable[str], steps: int) -> None:
        #: The name of the first violated invariant and what happened; empty while all hold.
        self.broken = ""
        self._tasks = tuple(tasks)
        self._steps = steps
        self._attempts: list[Attempt] = []
        #: The attempt that each process applied, by the process and the step.
        self._applied: dict[tuple[str, int], Attempt] = {}
        self._updates: Counter[str] = Counter()
        self._held: dict[str, range] = {}
        self._given_up: set[tuple[str, float]] = set()
        self._done: set[int] = set()
        self._rosters: dict[str, Roster] = {}
        #: By process, the time when the first variable was placed on it.
        self._holders: dict[str, float] = {}
        self._dead: set[str] = set()
        #: By process, the times of its signs of life at the coordinator.
        self._heard_at_s: dict[str, list[float]] = {}
        self._office: str | None = None
        self._arrived: set[str] = set()
        self._barriers: dict[int, BarrierPassed] = {}

    def require(self, holds: bool, name: str, text: str) -> None:
        """Record the first violation. It is not raised, since the code under test might handle it as its own error."""
        if not holds and not self.broken:
            self.broken = f"{name}: {text}"

    # Steps.

    def begin(self, worker: str, step: int) -> Attempt:
        """A worker begins a step."""
        attempt = Attempt(len(self._attempts), step, worker)
        self._attempts.append(attempt)
        return attempt

    def updates(self, process: str) -> int:
        """Return the number of updates that a process of a ps task has applied."""
        return self._updates[process]

    def has_values(self, number: int, updates: Mapping[str, int]) -> None:
        """A worker's attempt has the values of all ps, which were read after these numbers of updates."""
        self._attempts[number].read = updates

    def applied(self, number: int, process: str, limit: int | None) -> Attempt:
        """A process of a ps task applies an attempt, which may lack at most `limit` updates."""
        attempt = self._attempts[number]
        lacks = self._updates[process] - attempt.read[process.partition("'")[0]]
        text = f"step {attempt.step} of {attempt.worker} lacks {lacks} updates on {process}, above {limit}"
        self.require(limit is None or lacks <= limit, "bounded staleness", text)
        self._updates[process] += 1
        before = self._applied.setdefault((process, attempt.step), attempt)
        text = f"{process} applies step {attempt.step} of {attempt.worker} after that of {before.worker}"
        self.require(before is attempt and process not in attempt.applied_on, "applied once", text)
        attempt.applied_on.append(process)
        return attempt

    def failed(self, attempt: Attempt, why: str) -> None:
        """A worker's attempt failed at the worker."""
        attempt.ended = attempt.ended or f"{attempt.worker} saw it fail ({why})"

    def forgets_claims(self) -> None:
        """The coordinator has ended with changes that it could not write: it may give claimed steps to others."""
        self._held = {}

    def died(self, process: str, why: str) -> None:
        """A process has ended."""
        self._dead.add(process)
        for attempt in self._attempts:
            if attempt.worker == process and not attempt.reported:
                attempt.ended = attempt.ended or f"{process} {why}"

    def seen(self, tasks: Sequence[TaskInfo]) -> None:
        """Apply the coordinator's list of tasks: a task that left holds no steps.

        If it was elected and did not end normally, another worker may be elected.
        """
        for info in tasks:
            if info.left_at_s is None or (info.task, info.joined_at_s) in self._given_up:
                continue
            self._given_up.add((info.task, info.joined_at_s))
            self._held.pop(info.task, None)
            if self._office == info.task and info.left not in NORMAL_ENDS:
                self._office = None
            for attempt in self._attempts:
                if name_of(attempt.worker) == info.task and not attempt.reported:
                    attempt.ended = attempt.ended or f"{attempt.worker} was given up: {info.left}"

    def claims(self, worker: str) -> None:
        """The coordinator receives the worker's claim for steps, and takes back the steps that the worker held."""
        self._held.pop(worker, None)

    def told_complete(self, worker: str, steps_done: int) -> None:
        """The coordinator answers a worker's claim by the message that the run is complete."""
        text = f"{worker} is told that the run is complete, and {steps_done} of {self._steps} steps are done"
        self.require(steps_done == self._steps, "none lost", text)

    def claimed(self, worker: str, steps: range, live: Collection[str]) -> None:
        """The coordinator assigns steps to a worker; `live` are the tasks that it regards as live."""
        again = sorted(self._done.intersection(steps))
        self.require(not again, "done once", f"step {again[:1]} is given to {worker} and is done")
        for other, held in self._held.items():
            shared = range(max(held.start, steps.start), min(held.stop, steps.stop))
            text = f"step {shared.start} is given to {worker}, and {other} has it and is live"
            self.require(not shared or other == worker, "done once", text)
        self.require(worker in live, "done once", f"{steps} are given to {worker}, which has left")
        self._held[worker] = steps

    def reported(self, attempts: Iterable[Attempt]) -> None:
        """The coordinator has recorded the steps of these attempts as done."""
        for attempt in attempts:
            applied = {name_of(process) for process, step in self._applied if step == attempt.step}
            missing = [task for task in self._tasks if name_of(task) not in applied]
            text = f"step {attempt.step} counts as done, and {missing} did not apply it"
            self.require(not missing, "none lost", text)
            again = f"step {attempt.step} is counted as done a second time, for {attempt.worker}"
            self.require(attempt.step not in self._done, "done once", again)
            attempt.reported = True
            self._done.add(attempt.step)

    def repeated(self) -> tuple[Repeated, ...]:
        """Return the steps that were tried again although an attempt had been applied."""
        counts = Counter(attempt.step for attempt in self._attempts)
        by_step: dict[int, list[str]] = {}
        for attempt in self._attempts:
            if attempt.applied_on and not attempt.reported and counts[attempt.step] > 1:
                by_step.setdefault(attempt.step, []).append(attempt.ended)
        return tuple(Repeated(step, tuple(reasons)) for step, reasons in sorted(by_step.items()))

    # Membership.

    def coordinator_started(self, now_s: float) -> None:
        """The coordinator has started again. Its time goes on from its last write; it waits for all tasks again."""
        self._holders = {process: min(at_s, now_s) for process, at_s in self._holders.items()}
        for heard in self._heard_at_s.values():
            heard[:] = [*(at_s for at_s in heard if at_s <= now_s), now_s]

    def holds(self, process: str, now_s: float) -> None:
        """The coordinator has placed a variable on a process; times of this and the next method are its own."""
        self._holders.setdefault(process, now_s)

    def lives(self, process: str, now_s: float) -> None:
        """The coordinator receives a sign of life of a process."""
        self._heard_at_s.setdefault(process, []).append(now_s)

    def _check_holder(self, who: str, info: TaskInfo) -> None:
        if info.left_at_s is None or info.process not in self._holders.keys() - self._dead:
            return
        if info.left_at_s < self._holders[info.process]:
            return  # it joined again, and has become a holder since
        silent_s = info.left_at_s - max(at_s for at_s in self._heard_at_s[info.process] if at_s <= info.left_at_s)
        text = f"{who} learns that {info.process} left ({info.left}), which was silent for {silent_s:.2f} s"
        self.require(silent_s >= HOLDER_S, "holder kept", text)

    def roster(self, who: str, roster: Roster) -> None:
        """A process receives a roster: it must list each live task once, and be no older than the roster before."""
        live = [info.task for info in roster.tasks if info.left_at_s is None]
        self.require(
            len(live) == len(set(live)), "one of a name", f"{who} is told of two live tasks of a name in {live}"
        )
        before = self._rosters.get(who)
        if before is not None:
            text = f"{who} is told of {len(roster.tasks)} tasks after {len(before.tasks)}"
            self.require(len(roster.tasks) >= len(before.tasks), "rosters in order", text)
            for old, new in zip(before.tasks, roster.tasks, strict=False):
                is_later = old == new or (
                    old.left_at_s is None and (old.task, old.joined_at_s) == (new.task, new.joined_at_s)
                )
                self.require(is_later, "rosters in order", f"{who} is told {new} after {old}")
        for info in roster.tasks if before is None else set(roster.tasks) - set(before.tasks):
            self._check_holder(who, info)
        self._rosters[who] = roster

    def elected(self, worker: str) -> None:
        """The coordinator has elected a worker."""
        text = f"{worker} is elected, and {self._office} was and is live"
        self.require(self._office in (None, worker), "one in office", text)
        self._office = worker

    def arrives(self, task: str) -> None:
        """The coordinator receives a task's arrival at the barrier."""
        self._arrived.add(task)

    def passed(self, task: str, passed: BarrierPassed) -> None:
        """The coordinator tells a task that it has passed the barrier."""
        if passed.generation not in self._barriers:
            absent = sorted(set(passed.members) - self._arrived)
            self.require(not absent, "one view", f"{task} passes barrier {passed.generation} before {absent} have come")
            self._arrived -= set(passed.members)
        first = self._barriers.setdefault(passed.generation, passed)
        text = (
            f"{task} passes barrier {passed.generation} of {passed.members}, and another passed it of {first.members}"
        )
        self.require((passed.version, passed.members) == (first.version, first.members), "one view", text)
        self.require(task in passed.members, "one view", f"{task} passes a barrier of {passed.members}")

    # Waits and memory.

    def wait(self, who: str, what: str, until_s: float, now_s: float) -> None:
        """A process still waits at `now_s`, with the deadline `until_s`."""
        if now_s > until_s + SLACK_S:
            text = f"at {now_s:.1f} s {who} still waits for {what}, which was to end at {until_s:.1f} s"
            self.require(False, "waits end", text)

    def task_waits(self, task: str, endless: int) -> None:
        """A task has `endless` waits for values that have passed their deadlines and go on."""
        self.require(not endless, "waits end", f"{endless} waits of {task} go on after their deadlines")

    def memory(self, task: str, found: TaskStatistics, origins: int) -> None:
        """Check the number of ended steps that a task remembers; `origins` is the number of tasks that start steps."""
        most, has = WINDOW * max(1, origins), found.rendezvous.remembered
        if has > most:
            self.require(False, "bounded", f"{task} remembers {has} ended steps of {origins} tasks, above {most}")

    # The end.

    def is_nothing_left(self, statistics: Mapping[str, TaskStatistics]) -> bool:
        """Whether all tasks have released everything that belongs to a step."""
        return not any(any(_left(found)) for found in statistics.values())

    def end(self, statistics: Mapping[str, TaskStatistics]) -> None:
        """Check the final state: all steps have ended, and no event is pending."""
        missing = sorted(set(range(self._steps)) - self._done)
        self.require(not missing, "none lost", f"steps {missing} of {self._steps} are not done at the end")
        for repeated in self.repeated():
            text = f"step {repeated.step} was tried more than once and no task died: {repeated.reasons}"
            self.require(all(repeated.reasons), "none lost", text)
        self.check_nothing_left(statistics)

    def check_nothing_left(self, statistics: Mapping[str, TaskStatistics]) -> None:
        """Check that the tasks hold nothing that belongs to a step."""
        for task, found in statistics.items():
            text = f"{task} holds (plans that run, steps, values, waits) = {_left(found)}"
            self.require(not any(_left(found)), "nothing left", text)


def _left(found: TaskStatistics) -> tuple[int, ...]:
    held = found.rendezvous
    return found.running, held.open_steps, held.values, held.waiters
