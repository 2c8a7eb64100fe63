"""The progress of runs of training, for people: steps and rounds done, each worker's metrics, trainers' whole runs.

A trainer's run is a plan of several runs. Invariant: such a run is part of the plan whose name its own name begins
with, and its steps count in the plan if the run begins at the plan's first step or later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from dflow.distributed.coordinator.coordinator_events import Command, Log
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Notices, Received
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.snapshots.cluster_snapshots import ClusterSnapshots
from dflow.distributed.snapshots.resumption import PROGRESS
from dflow.distributed.training.work_messages import ROUNDS, ClaimSteps, RoundsDone, StepsDone, TrainingPlan
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.status import NotFinite, WorkerProgress
from dflow.tracing.devices.task_name import short_task_name

#: By run, the number of steps or rounds done, and of all steps or rounds.
Counts = Mapping[str, tuple[int, int]]
_PART = re.compile(r"(.*) ([0-9]+)-[0-9]+", re.DOTALL)
_PLAN, _PROGRESS, _NOT_FINITE, _ROUNDS = "training plan/", "progress/", "not finite/", "rounds/"


class ProgressCopy(msgspec.Struct, frozen=True):
    """The counts of all runs of training, and of those whose steps are rounds, as in `Counts`."""

    counts: dict[str, tuple[int, int]] = {}
    rounds: dict[str, tuple[int, int]] = {}


class RunProgress(CoordinatorPart):
    """The progress of one cluster's runs, kept in its records."""

    notices: ClassVar[Notices[RunProgress]] = HandlerTable()
    copied = ProgressCopy
    may_be_lost = (_PLAN, _PROGRESS, _NOT_FINITE, _ROUNDS)

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        self._records = records = core.records
        self._workers = dict(records.load(_PROGRESS, WorkerProgress))
        #: The first loss that is not finite of each run and name.
        self._not_finite = {(one.run, one.metric): one for _, one in records.load(_NOT_FINITE, NotFinite)}
        self._plans = dict(records.load(_PLAN, TrainingPlan))
        #: By run whose steps are claimed: the numbers of steps done and of all steps.
        self._claimed: dict[str, tuple[int, int]] = {}
        #: The same of runs of synchronous training. They have records only in a cluster that goes on from a snapshot,
        #: since workers report them repeatedly.
        self._rounds = {name: (one["done"], one["total"]) for name, one in records.load(_ROUNDS, dict[str, int])}
        #: Texts for the log.
        self.news: list[str] = []

    @notices.handles(RoundsDone)
    def _note_rounds(self, report: RoundsDone, received: Received) -> Sequence[Command]:
        self.note_rounds(report, self._core.part(ClusterSnapshots).counted.undone)
        return []

    def after_event(self, at_s: float) -> Sequence[Command]:
        """Return commands that log the texts of `take_news`."""
        return [*map(Log, self.take_news())]

    def take_news(self) -> list[str]:
        """Return the texts for the log since the last call."""
        news, self.news = self.news, []
        return news

    def status(self) -> Mapping[str, Any]:
        """Return the numbers of steps done and of all steps, and the first losses that are not finite."""
        done, total = self.steps(self.counts())
        return {"steps_done": done, "steps_total": total, "not_finite": tuple(self._not_finite.values())}

    def workers(self) -> tuple[WorkerProgress, ...]:
        """Return the progress of each task that ever reported steps, by name."""
        return tuple(one for _, one in sorted(self._workers.items()))

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the number of steps or rounds done, and of all, in each run of training."""
        return self._claimed | self._rounds

    def count(self, run: str, done: int, total: int) -> None:
        """Set the numbers of steps done and of all steps of a run whose steps are claimed."""
        self._claimed[run] = done, total

    def note(self, report: ClaimSteps | StepsDone | RoundsDone, steps: int, dropped: int = 0) -> None:
        """Add the steps and metrics of a report to its worker's progress; log a run's first loss that is not finite.

        steps    number of the worker's steps since its last report
        dropped  number of these steps whose gradients came too late
        """
        last = self._workers.get(report.task, WorkerProgress(report.task, 0, 0.0, {}))
        self._workers[report.task] = now = WorkerProgress(
            report.task,
            last.steps + steps,
            report.step_s or last.step_s,
            {**last.metrics, **report.metrics},
            last.dropped + dropped,
        )
        if not isinstance(report, RoundsDone):  # these come again
            self._records.put(_PROGRESS + report.task, now)
        self._note_not_finite(report.run, report.task, report.not_finite)

    def _note_not_finite(self, run: str, task: str, found: NotFinite | None) -> None:
        if found is None or (run, found.metric) in self._not_finite:
            return
        first = msgspec.structs.replace(found, run=run, task=task)
        self._not_finite[run, found.metric] = first
        self._records.put(f"{_NOT_FINITE}{run}/{found.metric}", first)
        where = f"step {found.step} of run {run!r} on {short_task_name(task)}"
        self.news.append(f"{found.metric} is {found.value} at {where}; later ones of this run are not announced")

    def note_rounds(self, report: RoundsDone, undone: int) -> None:
        """Record a live worker's report of a run of synchronous training: the run's rounds, and the worker's progress.

        undone  number of returns to a snapshot that undid steps; rounds from before the newest one are not counted
        """
        done, total = self._rounds.get(report.run, (0, 0))
        rounds = report.rounds if report.undone == undone else 0
        self._rounds[report.run] = max(done, rounds), max(total, report.total_rounds)
        self.note(report, report.steps, report.dropped)

    # Snapshots.

    def steps_done(self) -> int | None:
        """Number of steps done in all runs, with the steps of earlier programs; None before the first one.

        Also None in the first part of a trainer's run by `Async` or `Sync` with one checkpoint manager: its first
        checkpoint is saved after this part, and is newer. Steps of a loop of the program's own are numbered from the
        ledger alone, or from the host of the rounds, so they count.
        """
        counts, saves = self.counts(), sum(name.startswith(PROGRESS) for name in self._core.directory.names()) == 1
        # Rounds are reported late: a host of rounds may have done some that are not known here.
        may_have = {*self._rounds, *self._hosted()} | {run for run, (done, _) in self._claimed.items() if done}
        counted = any(self._is_counted(run, run in may_have, saves) for run in {*counts, *may_have})
        return self.steps(counts)[0] if counted else None

    def _hosted(self) -> Iterator[str]:
        """Yield the names of runs that a task hosts, from before their first round on."""
        hosted = (info for info in self._core.directory.variables() if info.kind == "run")
        return (info.name.removesuffix(ROUNDS) for info in hosted if info.name.endswith(ROUNDS))

    def _is_counted(self, run: str, may_have: bool, saves: bool) -> bool:
        part = _PART.fullmatch(run)
        plan = self._plans.get(part[1]) if part is not None else None
        if part is None or plan is None or plan.first > 0 or int(part[2]) > 0:
            return True
        return may_have and not saves

    def copy(self) -> ProgressCopy:
        """Return a copy of the counts."""
        return ProgressCopy(self.counts(), dict(self._rounds))

    @classmethod
    def records_of(
        cls, copy: ProgressCopy, before: DurableRecords
    ) -> Iterator[tuple[str, msgspec.Struct | Mapping[str, Any]]]:
        """Yield the records of the rounds, and of the plans that have a part among the copied runs.

        Other plans are left out, and those in their first part: their programs send them again, perhaps with another
        first step. No plan is over: its program sends that again too.
        """
        for name, (done, total) in copy.rounds.items():
            yield _ROUNDS + name, {"done": done, "total": total}
        parts = map(_PART.fullmatch, copy.counts)
        begun = {part[1] for part in parts if part is not None and int(part[2])}
        for name, plan in before.load(_PLAN, TrainingPlan):
            if name in begun:
                yield _PLAN + name, msgspec.structs.replace(plan, is_over=False)

    def return_to(self, copy: ProgressCopy) -> int:
        """Return to the rounds of a copy; give the number of rounds that are done again."""
        redone = sum(done for done, _ in self._rounds.values()) - sum(done for done, _ in copy.rounds.values())
        self._rounds = dict(copy.rounds)
        return redone

    def announce_undone(self, undone: Counts, before: Counts) -> None:
        """Log the runs that the program must run again after a return to a snapshot.

        undone  the counts of runs that were complete before the return, and are not any more
        before  the counts of all runs before the return
        """
        for name, (done, total) in self.to_run_again(undone, before, self.counts()).items():
            self.news.append(f"run {name!r} was complete, and has {done} of {total} steps done now: run it again")

    # Plans.

    @notices.handles(TrainingPlan)
    def note_plan(self, plan: TrainingPlan, received: Received | None = None) -> Sequence[Command]:
        """Record a plan. Of a plan that is known, keep the lower `first`, and that it is over.

        Why: a worker that is started again reports the steps that are done by then as those of earlier programs.
        """
        if (known := self._plans.get(plan.run)) is not None:
            plan = msgspec.structs.replace(
                plan, first=min(plan.first, known.first), is_over=plan.is_over or known.is_over
            )
        self._plans[plan.run] = plan
        self._records.put(_PLAN + plan.run, plan)
        return []

    def to_run_again(self, undone: Counts, before: Counts, counts: Counts) -> dict[str, tuple[int, int]]:
        """Return the runs that the program must run again, with their counts; a plan takes the place of its parts.

        undone  the counts of runs that were complete, and are not any more
        before  the counts of all runs when those were complete; a plan that was not complete then is left out, as its
                program repeats its parts
        counts  the present counts of all runs
        """
        found = {}
        for run, count in undone.items():
            part = _PART.fullmatch(run)
            plan = self._plans.get(part[1]) if part is not None else None
            if plan is None:
                found[run] = count
            elif plan.is_over or self._done(plan, before) >= plan.total:
                found[plan.run] = self._done(plan, counts), plan.total
        return found

    def _done(self, plan: TrainingPlan, counts: Counts) -> int:
        parts = ((_PART.fullmatch(run), done) for run, (done, _) in counts.items())
        own = (done for part, done in parts if part is not None and part[1] == plan.run and int(part[2]) >= plan.first)
        return plan.first + sum(own)

    def steps(self, counts: Counts) -> tuple[int, int]:
        """Return the numbers of steps done and of all steps, in all plans and all runs that are in no plan."""
        done_of, others = {name: plan.first for name, plan in self._plans.items()}, (0, 0)
        for run, (done, total) in counts.items():
            part = _PART.fullmatch(run)
            if part is None or part[1] not in self._plans:
                others = others[0] + done, others[1] + total
            elif int(part[2]) >= self._plans[part[1]].first:
                done_of[part[1]] += done
        totals = [done_of[name] if plan.is_over else plan.total for name, plan in self._plans.items()]
        return others[0] + sum(done_of.values()), others[1] + sum(totals)
