"""The schedule's program of synchronous training: `Sync` runs its steps, and each step gives one gradient.

In names, a synchronous step is a round, and the task that aggregates its gradients is the host. A gradient is a one-hot
vector with a 1 at the gradient's number, so a sum shows which gradients are in it. Each ps task gets all of a gradient,
as if it held a variable. The host and the other ps tasks run the real code for rounds, accumulators and updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from dflow.distributed.steps.step_starter import StepParts, cancel_elsewhere
from dflow.distributed.strategies.sync import Sync, Workers
from dflow.distributed.transport.base import Peer, Reply
from dflow.distributed.wire.messages.message import Answer, Request
from dflow.distributed.wire.messages.plans import RunPlan
from dflow.distributed.wire.messages.resources import CreateResource
from dflow.distributed.wire.messages.roster import Roster
from dflow.distributed.wire.messages.rounds import (
    LeaveRounds,
    NextRound,
    OpenRounds,
    ProposeRounds,
    RoundOpen,
    accumulator_on,
)
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.steps.plan import Call, Item, Plan, Recv, Scalar, Send, UseResource
from dflow.tracing.errors import DeadlineExceeded, DflowError
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.resource_op import ResourceOp
from tests.simulation.blocking_program import end_wait
from tests.simulation.checks import Require, name_of
from tests.simulation.steps_program import STEP_S, TrainingWorker
from tests.simulation.tasks import Member, SimulatedTasks, programs

#: Longest time that the host lets a worker wait for a round, and the time that the worker adds for the answer.
ROUND_S = 12.0
REQUEST_S = 6.0
COMPUTE_S = 0.4
#: Length of a gradient: more than the gradients of a schedule.
PLACES = 2048
#: Number of rows that tickets can be indices of.
_TICKETS = 2**31 - 1


@dataclass
class _Gradient:
    """A worker's gradient for one opening; `is_fresh` is the accumulator's answer, None until the worker has it.

    `sums`  number of sums that contain it
    """

    number: int
    worker: str
    run: str
    opening: int
    is_fresh: bool | None = None
    sums: int = 0


@dataclass
class _RunSeen:
    """One run in these lives of its tasks.

    `sums`     the numbers of the gradients in the sum of each opening
    `updates`  the openings whose sums each task applied, in order
    """

    rounds: int
    wanted: int
    sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    updates: dict[str, list[int]] = field(default_factory=dict)
    #: Workers that got an opening and never left, and workers that left (they may have returned, or not be missed yet).
    takes_part: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)


class RoundChecks:
    """The invariants of rounds; `require` records a violation.

    - `counted once`   a gradient is in at most one sum, once, that of its opening, and its worker knows whether it is;
    - `first m`        a sum has at most the wanted number of gradients, and fewer only if fewer workers take part;
    - `applied once`   each task applies the sums of a run once, in order;
    - `later rounds`   a worker that has completed an opening gets a later one;
    - `the dead`       no worker waits for a worker that left before the wait began, or when all workers have given;
    - `none lost`      if a run is reported complete, all tasks have applied all of its rounds; any other opening is one
                       whose update failed, which some tasks may have applied.
    """

    def __init__(self, require: Require, tasks: Sequence[str]) -> None:
        self._require, self._tasks = require, tasks
        #: The tasks that have left according to the host, and since when.
        self._gone: dict[str, float] = {}
        self._gradients: list[_Gradient] = []
        self._runs: dict[str, _RunSeen] = {}

    def opened(self, run: str, rounds: int, wanted: int) -> None:
        """A worker opens a run of `rounds` rounds with `wanted` gradients each."""
        self._runs.setdefault(run, _RunSeen(rounds, wanted))

    def gives(self, worker: str, run: str, opening: int) -> _Gradient:
        """A worker is about to give a gradient."""
        gradient = _Gradient(len(self._gradients), worker, run, opening)
        self._gradients.append(gradient)
        return gradient

    def told(self, run: str, worker: str, done: int, opening: RoundOpen) -> None:
        """The host has answered a worker that completed one opening with another."""
        seen, number = self._runs[run], opening.number
        text = f"{worker} has completed opening {done} of {run} and gets {number}"
        self._require(number > done, "later rounds", text)
        if worker not in seen.left:
            seen.takes_part.add(worker)
        text = f"{worker} gets opening {number} of {run} after {opening.done} rounds, and there were"
        # Until the run is over, more openings may follow while the answer is on its way.
        most = number if opening.done >= seen.rounds else len(seen.sums)
        self._require(opening.done <= len(seen.sums) <= most, "none lost", f"{text} {len(seen.sums)} sums")
        for task in self._tasks:
            applied = len(seen.updates.get(task, ()))
            self._require(opening.done <= applied <= most, "none lost", f"{text} {applied} updates of {task}")

    def overdue(self, run: str, worker: str, done: int, error: str, asked_s: float) -> None:
        """A worker's wait for the next opening has timed out at the host, whose error names the missing workers."""
        is_vain = done not in self._runs[run].sums and "and none did not" in error
        self._require(not is_vain, "the dead", f"all have given, and {worker} waits: {error}")
        _, _, missing = error.partition("gave one and ")
        for name, since_s in self._gone.items():
            text = f"{worker} has waited since {asked_s:.1f} s for {name}, which is gone since {since_s:.1f} s: {error}"
            self._require(since_s > asked_s or name not in missing, "the dead", text)

    def sees(self, roster: Roster, now_s: float) -> None:
        """The host receives a roster."""
        live = {info.task for info in roster.tasks if info.left_at_s is None}
        gone = {info.task for info in roster.tasks} - live
        self._gone = {task: self._gone.get(task, now_s) for task in gone}
        for info in roster.tasks:
            if info.left_at_s is not None:
                self.leaves(info.task)

    def leaves(self, worker: str) -> None:
        """A worker has died, left or been removed, or announces that it leaves."""
        for seen in self._runs.values():
            seen.takes_part.discard(worker)
            seen.left.add(worker)

    def summed(self, run: str, total: Any) -> None:
        """The host has taken a sum from the accumulator, and is about to apply it."""
        seen, total = self._runs[run], np.asarray(total)
        numbers = _places(total)
        number = self._gradients[numbers[0]].opening
        self._require(number not in seen.sums, "counted once", f"opening {number} of {run} has a second sum")
        for place in numbers:
            gradient = self._gradients[place]
            gradient.sums += 1
            text = f"the gradient of {gradient.worker} for opening {gradient.opening} of {gradient.run}"
            self._require(gradient.sums == 1, "counted once", f"{text} is in a second sum")
            self._require(total[place] == 1, "counted once", f"{text} is in a sum {total[place]} times")
            is_of_it = (gradient.run, gradient.opening) == (run, number)
            self._require(is_of_it, "counted once", f"{text} is in the sum of opening {number} of {run}")
            self._require(gradient.is_fresh is not False, "counted once", f"{text} is in its sum and was called stale")
        text = f"opening {number} of {run} has {len(numbers)} gradients, {seen.wanted} are wanted"
        self._require(len(numbers) <= seen.wanted, "first m", text)
        least = max(1, min(seen.wanted, len(seen.takes_part)))
        self._require(len(numbers) >= least, "first m", f"{text}, and {sorted(seen.takes_part)} take part")
        seen.sums[number] = numbers

    def updated(self, run: str, task: str, total: Any) -> None:
        """A task applies a sum."""
        seen, numbers = self._runs[run], _places(total)
        updates, number = seen.updates.setdefault(task, []), self._gradients[numbers[0]].opening
        text = f"{task} applies a sum of {numbers} of opening {number} of {run} after those of {updates}"
        is_next = seen.sums.get(number) == numbers and number > (updates[-1] if updates else -1)
        self._require(is_next, "applied once", text)
        updates.append(number)

    def end(self) -> None:
        """Check the final state: no event is pending."""
        for gradient in self._gradients:
            sums = self._runs[gradient.run].sums
            text = f"the gradient of {gradient.worker} for opening {gradient.opening} of {gradient.run}"
            is_there = gradient.sums == 1 or gradient.opening not in sums or not gradient.is_fresh
            self._require(is_there, "counted once", f"{text} was called fresh and is in no sum")


class RoundsWorker(TrainingWorker):
    """A worker that takes part in a run until it is complete, or until this worker has used `data` batches.

    See `sync.Workers` for the methods that `Sync` calls. It stands for the `round_part.Part` and `Gradients`, since
    nothing is traced here: the step has no gradients, and the plans that apply the averages only record them.
    """

    def __init__(
        self,
        member: Member,
        tasks: SimulatedTasks,
        checks: RoundChecks,
        ps: Sequence[str],
        rounds: int,
        workers: int,
        backups: int,
        data: int,
    ) -> None:
        super().__init__(member)
        self.is_complete = False
        self._tasks, self._checks = tasks, checks
        self._host, self._ps, self._rounds = ps[0], ps, rounds
        self._workers, self._backups = workers, backups
        self._batches = iter(range(data))
        self._name = self._accumulator = ""
        #: The handles of the ps tasks' plans in this worker's steps, by task.
        self._gives: Mapping[str, int] = {}
        self._plan = member.server.plans.add(*worker_plan(member.name, ps))

    def run(self) -> None:
        """Take part in the run of the tasks' present lives until a run is complete."""
        while not self.is_complete:
            try:
                # A task that ends loses its state, so a user would start a new run, from a checkpoint.
                name = f"run of {', '.join(f'{host} in life {self._tasks.life_of(host)}' for host in self._ps)}"
                sync = Sync(cast(Workers, self), backup_workers=self._backups)
                for _ in sync.run(self._compute, self._batches, steps=self._rounds, name=name):
                    pass
                self.is_complete = True
            except DflowError as error:
                self._member.failed(error)

    def _compute(self, batch: int) -> None:
        self._member.sleep(COMPUTE_S)

    # As `sync.Workers`.

    def colleagues(self) -> tuple[tuple[str, ...], int]:
        """Return the live workers, and the number of all workers."""
        return self._tasks.live_workers(self._member), self._workers

    def take_part(self, run: str, job: str) -> RoundsWorker:
        """Return this worker, as its part in the run."""
        self._name = run
        return self

    # As its part in the run.

    def run_step(self, gradients: RoundsWorker, step: Callable[..., Any], batch: int, number: int) -> tuple[Any, bool]:
        """Run the step for an opening."""
        return gradients.call(step, batch, number)

    def open(self, step: Callable[..., Any], batch: Any, steps: int, wanted: int) -> RoundsWorker | None:
        """Open the run, or join it if it is open; return None if it is complete."""
        run = self._name
        others = tuple(map(name_of, self._ps[1:]))
        proposal = ProposeRounds(run, self.task, steps, wanted, run, others)
        agreed = self._ask(proposal).message
        if agreed.is_over:
            return None
        wanted, self._accumulator = agreed.wanted, agreed.accumulator
        settings = AccumulatorSettings(Reduction.SUM, wanted)
        for host in self._ps:
            tickets = f", {wanted} rows of i32[{_TICKETS}]" * (len(self._ps) - 1 if host == self._host else 0)
            made = CreateResource(self._key(host), f"accumulator<i32[{PLACES}]{tickets}>", settings)
            self._member.ask(host, made, timeout_s=REQUEST_S)
        names = {host: name_of(host) for host in self._ps}
        keys = {host: self._key(host) for host in self._ps}
        on_sum, on_update = partial(self._checks.summed, run), partial(self._checks.updated, run)
        plans = partial(update_plans, names, keys, wanted, on_sum, on_update)
        handles = self._tasks.handles(f"{run} by {self._accumulator}", self._ps, plans)
        plans = partial(gradient_plans, names, keys, self.task)
        self._gives = self._tasks.handles(f"gradients of {self.task} for {self._accumulator}", self._ps, plans)
        self._checks.opened(run, steps, wanted)
        self._ask(OpenRounds(run, steps, wanted, self.colleagues()[0], self._accumulator, dict(handles)))
        return self

    def next(self, done: int) -> RoundOpen:
        """Wait for the opening after number `done`."""
        asked_s = self._tasks.events.now_s

        def told(reply: Any) -> None:
            if isinstance(reply, DeadlineExceeded):
                self._checks.overdue(self._name, self.task, done, str(reply), asked_s)

        message = NextRound(self._name, self.task, done, self._accumulator, ROUND_S)
        reply = self._member.ask(self._host, message, on_reply=told, timeout_s=ROUND_S + REQUEST_S)
        opening = reply.message
        self._checks.told(self._name, self.task, done, opening)
        self._member.say(f"gets opening {opening.number} after {opening.done} rounds")
        return opening

    def call(self, step: Callable[..., Any], batch: Any, number: int) -> tuple[None, bool]:
        """Run the step, and give its gradient; return whether it counts for the opening of that number."""
        step(batch)
        gradient = self._checks.gives(str(self._member.process), self._name, number)
        one = np.zeros(PLACES, np.int32)
        one[gradient.number] = 1
        id, others = StepId(self.task, next(self._member.numbers)), dict[str, Peer]()
        try:
            others.update((task, self._member.server.peer(task)) for task in self._gives)
            gradient.is_fresh = self._given(id, others, [one, np.asarray(number, np.int32)])
        except DflowError as error:
            self._member.server.runs.cancel(id, error)
            cancel_elsewhere(id, others.values(), error)
            raise
        said = "counts" if gradient.is_fresh else "came too late"
        self._member.say(f"gave gradient {gradient.number} for opening {number}, which {said}")
        return None, bool(gradient.is_fresh)

    def _given(self, id: StepId, others: Mapping[str, Peer], feeds: Sequence[Any]) -> bool:
        """Run the step that gives a gradient to all ps tasks; return whether it counts."""
        future = Future[Fetches]()
        parts = StepParts((self.task, *others), partial(end_wait, future))
        for task, peer in others.items():
            peer.start(RunPlan(self._gives[task], id.origin, id.number), on_reply=partial(parts.ended, task))
        server = self._member.server
        server.runs.run(server.plans.get(self._plan), id, feeds, partial(parts.ended, self.task))
        (is_fresh,) = self._member.wait("the end of a step", STEP_S, future)
        return bool(is_fresh)

    def _key(self, host: str) -> str:
        """Return the name of the run's accumulator on a host."""
        name = self._accumulator
        return name if host == self._host else accumulator_on(name_of(host), name)

    def leave(self, done: int) -> None:
        """Leave the run."""
        self._checks.leaves(self.task)
        try:
            self._ask(LeaveRounds(self._name, self.task, done, self._accumulator))
        except DflowError as error:
            self._member.say(f"could not say that it leaves {self._name}: {error}")

    def _ask(self, message: Request[Answer]) -> Reply[Answer]:
        return self._member.ask(self._host, message, timeout_s=REQUEST_S)


def _places(total: Any) -> tuple[int, ...]:
    """Return the numbers of the gradients in a sum."""
    return tuple(int(number) for number in np.nonzero(np.asarray(total))[0])


def worker_plan(worker: str, ps: Sequence[str]) -> tuple[Plan, list[Program]]:
    """Return a worker's plan of a step; its feeds are a gradient and its opening, its fetch whether they count."""
    sends = [Send(_edge("gradient", host), name_of(host), (0, 1)) for host in ps]
    items: tuple[Item, ...] = (*sends, Recv("is fresh", name_of(ps[0]), (2,), (("bool", ()),)))
    return Plan(worker, 3, items, feeds=(0, 1), fetches=(2,)), []


def gradient_plans(
    names: Mapping[str, str], keys: Mapping[str, str], worker: str
) -> Mapping[str, tuple[Plan, list[Program]]]:
    """Return, by host, the plan of its part in a worker's steps, which takes the worker's gradient.

    names, keys  the tasks' names, and the names of their accumulators, by host; the first is the host of the run
    """
    first, *others = names
    keep, apply = ResourceOp(ops.accumulator_keep.name), ResourceOp(ops.accumulator_apply.name)
    plans: dict[str, tuple[Plan, list[Program]]] = {}
    for host in names:
        items: tuple[Item, ...] = (Recv(_edge("gradient", host), worker, (0, 1), (("i32", (PLACES,)), ("i32", ()))),)
        if host != first:
            kept = UseResource(keys[host], keep, (0, 1), (2,))
            plans[host] = Plan(names[host], 3, (*items, kept, Send(_edge("ticket", host), names[first], (2,)))), []
            continue
        tickets = [
            Recv(_edge("ticket", other), names[other], (2 + at,), (("i32", ()),)) for at, other in enumerate(others)
        ]
        one, fresh = 2 + len(others), 3 + len(others)
        rows = [slot for ticket in range(2, one) for slot in (ticket, one)]
        applied = UseResource(keys[host], apply, (0, *rows, 1), (fresh,))
        items = (*items, *tickets, applied, Send("is fresh", worker, (fresh,)))
        scalars = (Scalar(one, "i32", np.int32(1).tobytes()),)
        plans[host] = Plan(names[host], fresh + 1, items, scalars=scalars), []
    return plans


def _edge(what: str, host: str) -> str:
    return f"{what} of {host}"


def update_plans(
    names: Mapping[str, str],
    keys: Mapping[str, str],
    wanted: int,
    on_sum: Callable[[Any], None],
    on_update: Callable[[str, Any], None],
) -> Mapping[str, tuple[Plan, list[Program]]]:
    """Return, by host, the plan of its part in the update of a run, and the plan's programs.

    names, keys  the tasks' names, and the names of their accumulators, by host; the first is the host of the run
    wanted       the largest number of gradients in a sum
    """
    first, *others = names

    def apply(host: str, total: Any) -> tuple[()]:
        on_update(host, total)
        return ()

    def apply_first(total: Any) -> tuple[()]:
        on_sum(total)
        return apply(first, total)

    # The others' tickets are the indices in the rows that the host takes.
    feeds = tuple(range(1 + 2 * len(others)))
    sends = [Send(_edge("tickets", host), names[host], (1 + 2 * at,)) for at, host in enumerate(others)]
    # Another task may apply the sum before the host would, so the checks hear of it before it is sent.
    items: tuple[Item, ...] = (Call(0, (), (), (0,), ()), *(replace(send, after=(0,)) for send in sends))
    plans = {first: (Plan(names[first], len(feeds), items, feeds=feeds), programs(apply_first))}
    take = ResourceOp(ops.accumulator_take_kept.name)
    for host in others:
        items = (
            Recv(_edge("tickets", host), names[first], (0,), (("i32", (wanted,)),)),
            UseResource(keys[host], take, (0,), (1,)),
            Call(0, (), (), (1,), ()),
        )
        plans[host] = (Plan(names[host], 2, items), programs(partial(apply, host)))
    return plans
