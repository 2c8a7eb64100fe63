"""Distribution of a run's steps over workers, such that each step is done although workers come and go.

A run has `total_steps` steps. Workers claim consecutive ranges of them, large at first and small towards the end
(guided self-scheduling), so that fast workers do more and all end at about the same time. A claim is the work of about
`CLAIM_WORK_S`. While a worker does it, it reports the steps that are done, so that few are done again when it dies.

Invariants, of each run:
- each step is in the pool, in exactly one worker's claim, or done; it becomes done once;
- the unreported steps of a claim return to the pool when its worker leaves the cluster or the run; the lowest numbers
  are claimed first;
- a request is answered exactly once; it waits only while the pool is empty and another worker holds a claim;
- a repeated claim, by its number, gets the same steps and counts nothing twice; steps given to a claim whose answer
  the worker never saw return to the pool with its next claim;
- a step that was left over, which tasks may have applied in part, is claimed alone: between two steps of a worker its
  claim has no other one that others would have to wait for;
- the sums that claims report with their steps, such as those of an evaluation, have each step once;
- an answer without steps means that all steps are done, unless the claim had `more` false.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from dflow.distributed.asynchronous.claimed_run import (
    RUN,
    WORKER,
    ClaimedRun,
    ClaimedRunRecord,
    WorkerRecord,
)
from dflow.distributed.coordinator.coordinator_events import Command, SendReply
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Notices, Received, Requests
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.snapshots.step_pauses import StepPauses
from dflow.distributed.training.run_progress import RunProgress
from dflow.distributed.training.work_messages import ClaimSteps, StepsDone
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.status import WorkerProgress
from dflow.lowering.values.index_set import IndexSet

#: Time from the failure of the last worker of a run to the line in the log, in s: its own error comes first, and its
#: next process may.
FAILURE_S = 3.0


class RunsCopy(msgspec.Struct, frozen=True):
    """The runs at one moment between two steps, by name; claimed steps that are not reported are unclaimed."""

    runs: dict[str, ClaimedRunRecord] = {}


class StepClaims(CoordinatorPart):
    """Gives the steps of one cluster's runs to the workers that claim them; `progress` has their counts."""

    requests: ClassVar[Requests[StepClaims]] = HandlerTable()
    notices: ClassVar[Notices[StepClaims]] = HandlerTable()
    copied = RunsCopy
    may_be_lost = (RUN, WORKER)

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        self._records = records = core.records
        self._pauses, self.progress = core.part(StepPauses), core.part(RunProgress)
        self._pauses.is_clear.append(self.is_clear)
        self._runs = {
            name: ClaimedRun(
                name,
                records,
                known.total_steps,
                known.done,
                IndexSet.of(known.pool),
                left_over=IndexSet.of(known.left_over),
                sums=known.sums,
                is_training=known.is_training,
            )
            for name, known in records.load(RUN, ClaimedRunRecord)
        }
        #: By run, the number of steps done when it was last logged as abandoned.
        self._announced: dict[str, int] = {}
        #: By run whose last worker has failed, since when.
        self._failed_s: dict[str, float] = {}
        #: Whether claims are held back, while the steps of all tasks are paused.
        self.is_held = False
        for _, found in records.load(WORKER, WorkerRecord):
            self._runs[found.run].note(found.worker)
        for run in self._runs.values():
            self._count(run)

    def after_event(self, at_s: float) -> Sequence[Command]:
        """Hold back claims during a pause of the steps, and answer them after it."""
        is_on = self._pauses.is_on
        return self.hold(is_on) if self.is_held != is_on else []

    def work_of(self, task: str) -> str:
        """Describe the steps that the task has claimed and not reported, and the workers that wait for them."""
        return "; ".join(run.describe_claim(task) for run in self._runs.values() if task in run.holding)

    def status(self) -> Mapping[str, Any]:
        """Return the progress of the workers, with the number of steps that each holds."""
        return {"workers": self.workers()}

    def workers(self) -> tuple[WorkerProgress, ...]:
        """Return the progress of each task that ever claimed steps, by name."""
        return tuple(
            msgspec.structs.replace(one, held=sum(run.held_by(one.task) for run in self._runs.values()))
            for one in self.progress.workers()
        )

    def copy(self) -> RunsCopy:
        """Return a copy of the runs, made while no worker runs a step."""
        return RunsCopy({name: run.record(is_copy=True) for name, run in self._runs.items()})

    @classmethod
    def records_of(cls, copy: RunsCopy, before: DurableRecords) -> Iterator[tuple[str, msgspec.Struct]]:
        """Yield the records of the runs with steps done, without workers; another one is made at its first claim."""
        for name, run in copy.runs.items():
            if run.done:
                yield RUN + name, run

    def return_to(self, copy: RunsCopy) -> int:
        """Set the runs to a copy; return the number of training steps that are done again.

        The claims made since are void, and workers that wait for steps still wait.
        """
        before, redone, undone = self.progress.counts(), 0, {}
        for name, run in self._runs.items():
            was_done, done, goes_on = run.done == run.total_steps, run.done, bool(run.waiting)
            run.return_to(copy.runs.get(name, ClaimedRunRecord(run.total_steps, 0, ((0, run.total_steps),))))
            self._count(run)
            if run.is_training:
                redone += done - run.done
                if was_done and run.done < run.total_steps and not goes_on:
                    undone[name] = run.done, run.total_steps
        self.progress.announce_undone(undone, before)
        return redone

    def _count(self, run: ClaimedRun) -> None:
        if run.is_training:
            self.progress.count(run.name, run.done, run.total_steps)

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> Sequence[Command]:
        """Return the steps of all tasks that have left to the pool; then answer the requests that wait for steps."""
        runs = self._runs.values()
        replies = [reply for run in runs for one in left for reply in run.leave(one.task, one.reason)]
        replies += self._answer_waiting()
        for run in self._runs.values():
            self._announce_end(run)
        return replies

    def hold(self, is_held: bool) -> list[SendReply]:
        """Hold back later claims if `is_held`; else answer those that were held back."""
        self.is_held = is_held
        return self._answer_waiting()

    def _answer_waiting(self) -> list[SendReply]:
        return [] if self.is_held else [reply for run in self._runs.values() for reply in run.answer_waiting()]

    def is_clear(self, asker: str) -> bool:
        """Whether a pause for the task `asker` may begin: no step that failed or was left must be done by others."""
        return all(run.is_clear(asker) for run in self._runs.values())

    def holds_work(self, task: str) -> bool:
        """Whether the task has claimed steps that it has not reported."""
        return any(task in run.holding for run in self._runs.values())

    @requests.handles(ClaimSteps)
    def claim(self, claim: ClaimSteps, received: Received) -> Sequence[Command]:
        """End the worker's last claim, and queue or answer this one; answer every request that can be answered now.

        The first claim creates the run. A claim that contradicts the run is refused as RemoteError; a repeated one gets
        the same steps.
        """
        ask = received.ask
        run = self._runs.get(claim.run)
        if run is None:
            pool = IndexSet([range(max(claim.total_steps, 0))])
            run = ClaimedRun(claim.run, self._records, claim.total_steps, 0, pool, is_training=claim.is_training)
        refusal = run.refusal(claim)
        if refusal:
            return [SendReply(ask, Failure("RemoteError", f"run {claim.run!r}: {refusal}"))]
        # Only now, so that a refused claim creates no run.
        self._runs[claim.run] = run
        if run.is_repeated(claim):
            return run.repeat(claim.task, ask, self.is_held)
        done = run.settle(claim)
        if run.is_training:
            self.progress.note(claim, done)
            self._count(run)
        replies = [*run.ask(claim, ask), *([] if self.is_held else run.answer_waiting())]
        self._announce_end(run)
        return replies

    @notices.handles(StepsDone)
    def note_done(self, report: StepsDone, received: Received | None = None) -> Sequence[Command]:
        """Record steps of a claim as done, as a live worker reports it, and answer requests that waited for them."""
        run = self._runs.get(report.run)
        done = run.note_done(report) if run is not None else 0
        if run is None or not done:
            return []
        self.progress.note(report, done)
        self._count(run)
        return [] if self.is_held else run.answer_waiting()

    def on_tick(self, at_s: float) -> Sequence[Command]:
        """Announce the end of runs whose last worker failed `FAILURE_S` ago or earlier."""
        for name, run in self._runs.items():
            if not (run.is_abandoned and run.has_failed and self._announced.get(name) != run.done):
                self._failed_s.pop(name, None)
            elif at_s - self._failed_s.setdefault(name, at_s) >= FAILURE_S:
                self._announce_end(run, is_late=True)
        return []

    def _announce_end(self, run: ClaimedRun, *, is_late: bool = False) -> None:
        if run.has_failed and not is_late:
            return
        if run.is_training and run.is_abandoned and self._announced.get(run.name) != run.done:
            self._announced[run.name] = run.done
            self.progress.news.append(
                f"run {run.name!r} has {run.done} of {run.total_steps} steps done, and no worker takes part in it any "
                "more: their batches have ended, their programs have left the loop, or they are lost"
            )
