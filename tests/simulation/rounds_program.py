"""The schedule's program of synchronous training: `Sync` runs its steps, and each step gives one gradient.

In names, a synchronous step is a round, and the task that aggregates its gradients is the host. A gradient is a one-hot
vector with a 1 at the gradient's number, so a sum shows which gradients are in it. Each ps task gets all of a gradient,
as if it held a variable. The host and the other ps tasks run the real code for rounds, accumulators and updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.steps.step_starter import StepParts, cancel_elsewhere
from dflow.distributed.synchronous.round_messages import (
    LeaveRounds,
    NextRound,
    OpenRounds,
    ProposeRounds,
    RoundOpen,
    accumulator_on,
)
from dflow.distributed.synchronous.step_aggregator import StepAggregator
from dflow.distributed.synchronous.sync import Sync
from dflow.distributed.training.strategy import StrategyRun
from dflow.distributed.transport.base import Peer, Reply
from dflow.distributed.wire.messages.message import Answer, Request
from dflow.distributed.wire.messages.plans import RunPlan
from dflow.distributed.wire.messages.resources import CreateResource
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.steps.plan import Call, Item, Plan, Recv, Scalar, Send, UseResource
from dflow.tracing.errors import DeadlineExceeded, DflowError
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.resource_op import ResourceOp
from tests.distributed.task_parts import part_of
from tests.simulation.blocking_program import end_wait
from tests.simulation.checks import name_of
from tests.simulation.round_checks import PLACES, RoundChecks
from tests.simulation.steps_program import STEP_S, TrainingWorker
from tests.simulation.tasks import Member, SimulatedTasks, programs

#: Longest time that the host lets a worker wait for a round, and the time that the worker adds for the answer.
ROUND_S = 12.0
REQUEST_S = 6.0
COMPUTE_S = 0.4
#: Number of rows that tickets can be indices of.
_TICKETS = 2**31 - 1


class SimulatedSync(Sync):
    """Trains on a `RoundsWorker`, whose steps are not traced."""

    compiles_steps = False

    def results(self, run: StrategyRun) -> Iterator[Any]:
        part: Any = cast(RoundsWorker, self.cluster).take_part(run.name)
        return self._rounds(part, run)


class RoundsWorker(TrainingWorker):
    """A worker that takes part in a run until it is complete, or until this worker has used `data` batches.

    It stands for the `RoundPart` and `Gradients` too, since nothing is traced here: the step has no gradients, and the
        plans that apply the averages only record them.
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
        self._opening = RoundOpen(0, 0)
        #: The handles of the ps tasks' plans in this worker's steps, by task.
        self._gives: Mapping[str, int] = {}
        self._plan = member.server.plans.add(*worker_plan(member.name, ps))

    def run(self) -> None:
        """Take part in the run of the tasks' present lives until a run is complete."""
        while not self.is_complete:
            try:
                # A task that ends loses its state, so a user would start a new run, from a checkpoint.
                name = f"run of {', '.join(f'{host} in life {self._tasks.life_of(host)}' for host in self._ps)}"
                sync = SimulatedSync(cast(Cluster, self), backup_workers=self._backups)
                for _ in sync.run(self._compute, self._batches, steps=self._rounds, name=name):
                    pass
                self.is_complete = True
            except DflowError as error:
                self._member.failed(error)

    def _compute(self, batch: int) -> None:
        self._member.sleep(COMPUTE_S)

    # As a cluster.

    def colleagues(self) -> tuple[tuple[str, ...], int]:
        """Return the live workers, and the number of all workers."""
        return self._tasks.live_workers(self._member), self._workers

    def take_part(self, run: str) -> RoundsWorker:
        """Return this worker, as its part in the run."""
        self._name = run
        return self

    # As its part in the run.

    def run_step(
        self, gradients: RoundsWorker, step: Callable[..., Any], batch: int, opening: RoundOpen
    ) -> tuple[Any, bool]:
        """Run the step for an opening."""
        return gradients.call(step, batch, opening.number)

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
            # As in `round_gradients`: a repeated update takes the gradients of the same opening.
            type = f"accumulator<i32[{PLACES}]{tickets}>"
            self.create(host, CreateResource(self._key(host), type, settings, is_saved=False))
        names = {host: name_of(host) for host in self._ps}
        keys = {host: self._key(host) for host in self._ps}
        on_sum = partial(self._checks.summed, self.seen_as())
        plans = partial(update_plans, names, keys, wanted, on_sum, self.changes)
        handles = self._tasks.handles(f"{run} by {self._accumulator}", self._ps, plans)
        plans = partial(gradient_plans, names, keys, self.task)
        self._gives = self._tasks.handles(f"gradients of {self.task} for {self._accumulator}", self._ps, plans)
        self._checks.opened(self.seen_as(), steps, wanted, self.rounds_done())
        named = self._accumulator, self._accumulator
        self._ask(OpenRounds(run, steps, wanted, self.colleagues()[0], *named, dict(handles)))
        return self

    # What differs with variables and snapshots.

    def seen_as(self) -> str:
        """Return the name of the run for the checks."""
        return self._name

    def rounds_done(self) -> int:
        """Return the number of rounds done when the run is opened first under the name `seen_as`."""
        return 0

    def create(self, host: str, made: CreateResource) -> None:
        """Create an accumulator on a host unless it exists."""
        self._member.ask(host, made, timeout_s=REQUEST_S)

    def changes(self, host: str, unused: int) -> Changes:
        """Return the items with which a host applies the sum in register 0; registers from `unused` on are free."""
        told = partial(self._checks.updated, self.seen_as(), host)
        return Changes((Call(0, (), (), (0,), (), touches_anything=True),), [_telling(told)])

    def next(self, done: int) -> RoundOpen:
        """Wait for the opening after number `done`."""
        asked_s = self._tasks.events.now_s

        def told(reply: Any) -> None:
            if isinstance(reply, DeadlineExceeded):
                host, error = self._tasks.member(self._host), str(reply)
                run = None if host is None else part_of(host.server, StepAggregator)._runs.get(self._name)
                is_updating = run is not None and run._rounds.is_updating
                self._checks.overdue(self.seen_as(), self.task, done, error, asked_s, is_updating=is_updating)

        message = NextRound(self._name, self.task, done, self._accumulator, ROUND_S)
        reply = self._member.ask(self._host, message, on_reply=told, timeout_s=ROUND_S + REQUEST_S)
        opening = self._opening = reply.message
        self._checks.told(self.seen_as(), self.task, done, opening)
        self._member.say(f"gets opening {opening.number} after {opening.done} rounds")
        return opening

    def call(self, step: Callable[..., Any], batch: Any, number: int) -> tuple[None, bool]:
        """Run the step, and give its gradient; return whether it counts for the opening of that number."""
        step(batch)
        gradient = self._checks.gives(str(self._member.process), self.seen_as(), self._opening)
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
        rows = [register for ticket in range(2, one) for register in (ticket, one)]
        applied = UseResource(keys[host], apply, (0, *rows, 1), (fresh,))
        items = (*items, *tickets, applied, Send("is fresh", worker, (fresh,)))
        scalars = (Scalar(one, "i32", np.int32(1).tobytes()),)
        plans[host] = Plan(names[host], fresh + 1, items, scalars=scalars), []
    return plans


def _edge(what: str, host: str) -> str:
    return f"{what} of {host}"


@dataclass(frozen=True)
class Changes:
    """The end of a task's plan of an update: its items, their programs, numbered from 0, and the scalars they use."""

    items: tuple[Item, ...]
    programs: list[Program]
    scalars: tuple[Scalar, ...] = ()


def update_plans(
    names: Mapping[str, str],
    keys: Mapping[str, str],
    wanted: int,
    on_sum: Callable[[Any], None],
    changes: Callable[[str, int], Changes],
) -> Mapping[str, tuple[Plan, list[Program]]]:
    """Return, by host, the plan of its part in the update of a run, and the plan's programs.

    names, keys  the tasks' names, and the names of their accumulators, by host; the first is the host of the run
    wanted       the largest number of gradients in a sum
    changes      see `RoundsWorker.changes`
    """
    first, *others = names
    # The others' tickets are the indices in the rows that the host takes.
    feeds = tuple(range(1 + 2 * len(others)))
    sends = [Send(_edge("tickets", host), names[host], (1 + 2 * at,)) for at, host in enumerate(others)]
    own = changes(first, len(feeds))
    # Another task may apply the sum before the host would, so the checks hear of it before it is sent.
    before = Call(len(own.programs), (), (), (0,), ())
    items: tuple[Item, ...] = (before, *(replace(item, after=(0,)) for item in (*sends, *own.items)))
    plans = {first: (_plan(names[first], items, own, feeds=feeds), [*own.programs, _telling(on_sum)])}
    take = ResourceOp(ops.accumulator_take_kept.name)
    for host in others:
        own = changes(host, 2)
        receive = Recv(_edge("tickets", host), names[first], (1,), (("i32", (wanted,)),))
        items = (receive, UseResource(keys[host], take, (1,), (0,)), *own.items)
        plans[host] = _plan(names[host], items, own), own.programs
    return plans


def _plan(task: str, items: tuple[Item, ...], changes: Changes, feeds: tuple[int, ...] = ()) -> Plan:
    used = [register for item in items for register in getattr(item, "gives", ())]
    registers = 1 + max((*feeds, *used, *(scalar.register for scalar in changes.scalars)))
    return Plan(task, registers, items, feeds=feeds, scalars=changes.scalars)


def _telling(told: Callable[[Any], None]) -> Program:
    """Return a program without results that the checks hear of."""

    def call(total: Any) -> tuple[()]:
        told(total)
        return ()

    return programs(call)[0]
