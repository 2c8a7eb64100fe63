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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.training.training_plans import TrainingPlans
from dflow.distributed.wire.messages.connection import Failure
from dflow.distributed.wire.messages.rounds import Claimed, ClaimSteps, NotFinite, RoundsDone, StepsDone
from dflow.distributed.wire.messages.status import WorkerProgress
from dflow.lowering.values.index_set import IndexSet
from dflow.tracing.devices.task_name import short_task_name

#: Most steps of a claim by a worker whose steps take an unknown time.
FIRST_CLAIM = 16
#: Most steps of any claim.
LARGEST_CLAIM = 1024
#: Longest work in a claim of several steps, as far as the worker's earlier steps tell, in s.
CLAIM_WORK_S = 1.0
#: Time from the failure of the last worker of a run to the line in the log, in s: its own error comes first, and its
#: next process may.
FAILURE_S = 3.0
#: A claim gets the worker's fair share of the remaining steps divided by this, so that a slow worker's last is small.
SHARE_DIVISOR = 4


class _Worker(msgspec.Struct, frozen=True):
    """A live worker's state in a run.

    `number`         number of its newest claim
    `first`, `count` first and number of the claimed steps, the answer to that claim
    `answered`       whether that claim was answered; otherwise it waits
    `takes_part`     whether the worker gets a share of the remaining steps
    `done`           number of the claimed steps that the worker has reported as done
    `step_s`         duration of its steps before that claim, in s; 0 if unknown
    `is_void`        whether the runs have returned to an earlier state since that claim
    `max_staleness`  the bound of its steps; None for none
    `least`          as in `ClaimSteps`
    """

    task: str
    number: int
    first: int = 0
    count: int = 0
    answered: bool = False
    takes_part: bool = True
    done: int = 0
    step_s: float = 0.0
    is_void: bool = False
    max_staleness: int | None = None
    least: int = 1

    @property
    def held(self) -> range:
        """The claimed steps that are not reported as done."""
        return range(self.first + self.done, self.first + self.count)


class _RunRecord(msgspec.Struct, frozen=True):
    """A run, without its workers."""

    total_steps: int
    done: int
    pool: tuple[tuple[int, int], ...]
    left_over: tuple[tuple[int, int], ...] = ()
    sums: dict[str, float] = {}
    is_training: bool = True


class _WorkerRecord(msgspec.Struct, frozen=True):
    run: str
    worker: _Worker


class LedgerCopy(msgspec.Struct, frozen=True):
    """The runs at one moment between two steps, by name; claimed steps that are not reported are in the pool.

    rounds  for each run of synchronous training, the numbers of rounds done and of all, as far as workers reported them
    """

    runs: dict[str, _RunRecord]
    rounds: dict[str, tuple[int, int]] = {}

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """The number of steps or rounds done, and of all, in each run of training."""
        return {name: (run.done, run.total_steps) for name, run in self.runs.items() if run.is_training} | self.rounds

    @property
    def steps_done(self) -> int:
        """Number of steps and rounds done in these runs."""
        return sum(done for done, _ in self.counts.values())

    @property
    def has_training(self) -> bool:
        """Whether a run of training had begun."""
        return bool(self.rounds) or any(run.is_training for run in self.runs.values())


def copied_runs(copy: LedgerCopy) -> Iterator[tuple[str, msgspec.Struct]]:
    """Yield the records of a ledger that begins with a copy of another one, with their keys."""
    for name, run in copy.runs.items():
        yield _RUN + name, run


class StepLedger:
    """The runs of one cluster, and each worker's progress in them, kept in `records`.

    plans  the trainers' runs, whose parts are runs here
    """

    def __init__(self, records: DurableRecords, plans: TrainingPlans | None = None) -> None:
        self._records, self._plans = records, plans or TrainingPlans(DurableRecords())
        self._progress = dict(records.load(_PROGRESS, WorkerProgress))
        self._runs = {
            name: _LedgerRun(
                name,
                records,
                known.total_steps,
                known.done,
                _index_set(known.pool),
                left_over=_index_set(known.left_over),
                sums=known.sums,
                is_training=known.is_training,
            )
            for name, known in records.load(_RUN, _RunRecord)
        }
        #: By run of synchronous training: rounds done, and rounds in all. Not durable: workers report them repeatedly.
        self._rounds: dict[str, tuple[int, int]] = {}
        self._not_finite = {(one.run, one.metric): one for _, one in records.load(_NOT_FINITE, NotFinite)}
        #: By run, the number of steps done when it was last logged as abandoned.
        self._announced: dict[str, int] = {}
        #: By run whose last worker has failed, since when.
        self._failed_s: dict[str, float] = {}
        #: Whether claims are held back, while the steps of all tasks are paused.
        self.is_held = False
        self._news: list[str] = []
        for _, found in records.load(_WORKER, _WorkerRecord):
            self._runs[found.run].note(found.worker)

    def leave(self, left: Mapping[str, str]) -> list[SendReply]:
        """Remove workers that left together, with their reasons, so that none gets steps that another one returns."""
        replies = [reply for run in self._runs.values() for one in left.items() for reply in run.leave(*one)]
        replies += self._answer_waiting()
        for run in self._runs.values():
            self._announce_end(run)
        return replies

    def copy(self) -> LedgerCopy:
        """Return a copy of the runs, made while no worker runs a step."""
        return LedgerCopy({name: run.record(is_copy=True) for name, run in self._runs.items()}, dict(self._rounds))

    def resume(self, copy: LedgerCopy) -> None:
        """Begin with the rounds of a copy, whose runs are in the records, for a status before tasks return to it."""
        self._rounds = dict(copy.rounds)

    def steps_done_in(self, copy: LedgerCopy) -> int:
        """Return the number of steps done in a copy, with those before the first of a trainer's run, as in a status."""
        return self._plans.steps(copy.counts)[0]

    def return_to(self, copy: LedgerCopy) -> None:
        """Return the runs to a copy; the claims made since are void, and workers that wait for steps still wait."""
        before = self.counts()
        self._rounds = dict(copy.rounds)
        undone = {}
        for name, run in self._runs.items():
            was_done, goes_on = run.done == run.total_steps, bool(run.waiting)
            run.return_to(copy.runs.get(name, _RunRecord(run.total_steps, 0, ((0, run.total_steps),))))
            if run.is_training and was_done and run.done < run.total_steps and not goes_on:
                undone[name] = run.done, run.total_steps
        for name, (done, total) in self._plans.to_run_again(undone, before, self.counts()).items():
            self._news.append(f"run {name!r} was complete, and has {done} of {total} steps done now: run it again")

    def hold(self, is_held: bool) -> list[SendReply]:
        """Hold back claims, or answer the claims that were held back."""
        self.is_held = is_held
        return self._answer_waiting()

    def _answer_waiting(self) -> list[SendReply]:
        return [] if self.is_held else [reply for run in self._runs.values() for reply in run.answer_waiting()]

    def is_clear(self, asker: str) -> bool:
        """Whether no step that failed, or that a worker left unreported, is still to be done by others than `asker`."""
        return all(run.is_clear(asker) for run in self._runs.values())

    def take_news(self) -> list[str]:
        """Return the texts for the log since the last call."""
        news, self._news = self._news, []
        return news

    @property
    def not_finite(self) -> tuple[NotFinite, ...]:
        """The first non-finite loss of each run and name."""
        return tuple(self._not_finite.values())

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the number of steps or rounds done, and of all, in each run of training."""
        return {run.name: (run.done, run.total_steps) for run in self._runs.values() if run.is_training} | self._rounds

    @property
    def steps_done(self) -> int:
        """Number of steps done in all runs."""
        return sum(done for done, _ in self.counts().values())

    @property
    def steps_total(self) -> int:
        """Number of steps of all runs, done or not."""
        return sum(total for _, total in self.counts().values())

    def holds(self, task: str) -> bool:
        """Whether the task has claimed steps that it has not reported."""
        return any(task in run.holding for run in self._runs.values())

    def describe_claims(self, task: str) -> str:
        """Describe the steps that the task has claimed and not reported, and the workers that wait for them."""
        return "; ".join(run.describe_claim(task) for run in self._runs.values() if task in run.holding)

    def workers(self) -> tuple[WorkerProgress, ...]:
        """Return the progress of each task that ever claimed steps, by name."""
        return tuple(
            msgspec.structs.replace(self._progress[task], held=sum(run.held_by(task) for run in self._runs.values()))
            for task in sorted(self._progress)
        )

    def claim(self, ask: int, claim: ClaimSteps) -> list[SendReply]:
        """Handle the claim of a live worker, and answer every request that can be answered now."""
        run = self._runs.get(claim.run)
        if run is None:
            pool = IndexSet([range(max(claim.total_steps, 0))])
            run = _LedgerRun(claim.run, self._records, claim.total_steps, 0, pool, is_training=claim.is_training)
        refusal = run.refusal(claim)
        if refusal:
            return [SendReply(ask, Failure("RemoteError", f"run {claim.run!r}: {refusal}"))]
        # Only now, so that a refused claim creates no run.
        self._runs[claim.run] = run
        if run.is_repeated(claim):
            return run.repeat(claim.task, ask, self.is_held)
        done = run.settle(claim)
        if run.is_training:
            self._note_progress(claim, steps=done)
            self._records.put(_PROGRESS + claim.task, self._progress[claim.task])
        replies = [*run.ask(claim, ask), *([] if self.is_held else run.answer_waiting())]
        self._announce_end(run)
        return replies

    def note_done(self, report: StepsDone) -> list[SendReply]:
        """Record steps of a claim as done, as a live worker reports it, and answer requests that waited for them."""
        run = self._runs.get(report.run)
        done = run.note_done(report) if run is not None else 0
        if run is None or not done:
            return []
        self._note_progress(report, steps=done)
        self._records.put(_PROGRESS + report.task, self._progress[report.task])
        return [] if self.is_held else run.answer_waiting()

    def tick(self, at_s: float) -> None:
        """Announce the end of runs whose last worker failed some time ago."""
        for name, run in self._runs.items():
            if not (run.is_abandoned and run.has_failed and self._announced.get(name) != run.done):
                self._failed_s.pop(name, None)
            elif at_s - self._failed_s.setdefault(name, at_s) >= FAILURE_S:
                self._announce_end(run, is_late=True)

    def _announce_end(self, run: _LedgerRun, *, is_late: bool = False) -> None:
        if run.has_failed and not is_late:
            return
        if run.is_training and run.is_abandoned and self._announced.get(run.name) != run.done:
            self._announced[run.name] = run.done
            self._news.append(
                f"run {run.name!r} has {run.done} of {run.total_steps} steps done, and no worker takes part in it any "
                "more: their batches have ended, their programs have left the loop, or they are lost"
            )

    def _note_not_finite(self, run: str, task: str, found: NotFinite | None) -> None:
        if found is None or (run, found.metric) in self._not_finite:
            return
        first = msgspec.structs.replace(found, run=run, task=task)
        self._not_finite[run, found.metric] = first
        self._records.put(f"{_NOT_FINITE}{run}/{found.metric}", first)
        where = f"step {found.step} of run {run!r} on {short_task_name(task)}"
        self._news.append(f"{found.metric} is {found.value} at {where}; later ones of this run are not announced")

    def _note_progress(self, report: ClaimSteps | StepsDone | RoundsDone, steps: int, dropped: int = 0) -> None:
        last = self._progress.get(report.task, WorkerProgress(report.task, 0, 0.0, {}))
        self._progress[report.task] = WorkerProgress(
            report.task,
            last.steps + steps,
            report.step_s or last.step_s,
            {**last.metrics, **report.metrics},
            last.dropped + dropped,
        )
        self._note_not_finite(report.run, report.task, report.not_finite)

    def note_rounds(self, report: RoundsDone, undone: int) -> None:
        """Record the progress of a run of synchronous training, as a live worker reports it.

        undone  number of returns to a snapshot that undid steps; rounds from before the newest one are not counted
        """
        done, total = self._rounds.get(report.run, (0, 0))
        rounds = report.rounds if report.undone == undone else 0
        self._rounds[report.run] = max(done, rounds), max(total, report.total_rounds)
        self._note_progress(report, report.steps, report.dropped)


@dataclass
class _LedgerRun:
    """One run: the pool of unclaimed steps, its workers, and the waiting requests by task, in order of arrival."""

    name: str
    records: DurableRecords
    total_steps: int
    done: int
    pool: IndexSet
    workers: dict[str, _Worker] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    holding: set[str] = field(default_factory=set)
    sharing: set[str] = field(default_factory=set)
    #: Steps that workers left unreported, or that failed, and that are not done yet: perhaps they are applied on some
    #: tasks only.
    left_over: IndexSet = field(default_factory=IndexSet)
    #: Sums by name over the steps done, as their workers reported them.
    sums: dict[str, float] = field(default_factory=dict)
    is_training: bool = True
    #: Whether the newest worker that took no part any more has failed or left.
    has_failed: bool = False

    def note(self, worker: _Worker) -> None:
        """Replace the state of a worker."""
        self.workers[worker.task] = worker
        (self.holding.add if worker.held else self.holding.discard)(worker.task)
        (self.sharing.add if worker.takes_part else self.sharing.discard)(worker.task)

    @property
    def is_abandoned(self) -> bool:
        """Whether unclaimed steps remain and no worker takes part any more."""
        return bool(self.pool) and not self.holding and not self.sharing

    def is_clear(self, asker: str) -> bool:
        """Whether no step that was left over is still to be done by others than `asker`, which waits between two steps.

        The one that `asker` has claimed is done, although the report may be on its way or lost.
        """
        if not self.left_over or not (self.holding | self.sharing) - {asker}:
            return True
        others = IndexSet(self.left_over.ranges())
        if asker in self.holding:
            others.discard(self.workers[asker].held)
        return not others

    def held_by(self, task: str) -> int:
        """Number of steps that the task has claimed and not reported."""
        return len(self.workers[task].held) if task in self.holding else 0

    def describe_claim(self, task: str) -> str:
        """Describe the steps that the task holds, and the workers that wait."""
        worker = self.workers[task]
        waiting = ", ".join(map(short_task_name, self.waiting))
        text = f"{len(worker.held)} claimed steps of run {self.name!r}, from {worker.held.start} on"
        return f"{text} (waiting for them: {waiting})" if waiting else text

    def refusal(self, claim: ClaimSteps) -> str:
        """Why this claim contradicts the known state; empty if it does not."""
        who = short_task_name(claim.task)
        if claim.total_steps < 0:
            return f"{who} asks for {claim.total_steps} steps in all; ask for 0 or more"
        if claim.total_steps != self.total_steps:
            return (
                f"it has {self.total_steps} steps and {who} asks for {claim.total_steps}; "
                "let all workers ask for the same number, or name another run"
            )
        others = (self.workers[task] for task in self.sharing - {claim.task})
        if other := next((one for one in others if one.max_staleness != claim.max_staleness), None):
            return (
                f"{short_task_name(other.task)} trains with max_staleness={other.max_staleness} and {who} asks for "
                f"{claim.max_staleness}; give all workers the same, or name another run"
            )
        worker = self.workers.get(claim.task)
        newest = worker.number if worker is not None else 0
        if claim.number < newest:
            return f"claim {claim.number} of {who} came after its claim {newest}"
        if not 0 <= claim.last < claim.number or (claim.done and claim.last > newest):
            return f"{who} reports claim {claim.last} in claim {claim.number}, and its newest is {newest}"
        count = worker.count if worker is not None and claim.last == newest and not worker.is_void else None
        if claim.done < 0 or (count is not None and claim.number > newest and claim.done > count):
            return f"{who} reports {claim.done} steps done of a claim of {count or 0}"
        return ""

    def is_repeated(self, claim: ClaimSteps) -> bool:
        """Whether this is the worker's newest claim, sent again."""
        worker = self.workers.get(claim.task)
        return worker is not None and worker.number == claim.number and not (worker.is_void and worker.answered)

    def repeat(self, task: str, ask: int, is_held: bool) -> list[SendReply]:
        """Answer as the first time, if not held back; a waiting request of the same claim is refused and replaced."""
        worker = self.workers[task]
        if worker.answered:
            return [SendReply(ask, Claimed(worker.first, worker.count, self.sums))]
        replies = self._refused(task, "RemoteError", f"{short_task_name(task)} has sent this claim again")
        self.waiting[task] = ask
        return replies if is_held else replies + self.answer_waiting()

    def settle(self, claim: ClaimSteps) -> int:
        """End the worker's last claim, before `ask`: its first steps are done, the rest return to the pool.

        Return the number done since its last report: 0 when the worker has not seen the answer to its last claim.
        """
        worker = self.workers.get(claim.task)
        if worker is None or not worker.held:
            return 0
        done = max(0, claim.done - worker.done) if claim.last == worker.number else 0
        self.done += done
        if done:
            self.sums = self.sums | {name: self.sums.get(name, 0.0) + value for name, value in claim.sums.items()}
        self.left_over.discard(worker.held[:done])
        self.pool.add(worker.held[done:])
        if claim.last == worker.number:  # otherwise the worker has begun none
            self.left_over.add(worker.held[done : done + 1])
        return done

    def note_done(self, report: StepsDone) -> int:
        """Record steps of the worker's newest claim as done; return the number done since its last report.

        A step that has failed counts as one that a dead worker left, until it is done.
        """
        worker = self.workers.get(report.task)
        if worker is None or worker.first != report.first or not worker.done <= report.done <= worker.count:
            return 0
        self.has_failed = report.has_failed
        if (done := report.done - worker.done) == 0 and not report.has_failed:
            return 0
        self.done += done
        self.left_over.discard(worker.held[:done])
        if report.has_failed:
            self.left_over.add(worker.held[done : done + 1])
        self._save(msgspec.structs.replace(worker, done=report.done))
        return done

    def ask(self, claim: ClaimSteps, ask: int) -> list[SendReply]:
        """Queue the worker's request for steps, or end its part if `more` is false."""
        replies = []
        if claim.task in self.waiting:
            text = f"a later claim of {short_task_name(claim.task)} has taken the place of this one"
            replies = [SendReply(self.waiting.pop(claim.task), Failure("RemoteError", text))]
        known = self.workers.get(claim.task)
        step_s = claim.step_s or (known.step_s if known is not None else 0.0)
        made = _Worker(claim.task, claim.number, answered=not claim.more, takes_part=claim.more, step_s=step_s)
        self._save(msgspec.structs.replace(made, max_staleness=claim.max_staleness, least=claim.least))
        self.has_failed = claim.has_failed
        if claim.more:
            self.waiting[claim.task] = ask
        else:
            replies.append(SendReply(ask, Claimed(0, 0, self.sums)))
        return replies

    def _refused(self, task: str, kind: str, text: str) -> list[SendReply]:
        """Return the error for the worker's waiting request, if there is one."""
        return [SendReply(self.waiting[task], Failure(kind, text))] if task in self.waiting else []

    def leave(self, task: str, reason: str) -> list[SendReply]:
        """Return the worker's unreported steps to the pool. Callers waiting for them are answered later."""
        replies = self._refused(task, "TaskLost", f"{short_task_name(task)} has left: {reason}")
        self.waiting.pop(task, None)
        worker = self.workers.pop(task, None)
        if worker is not None:
            self.has_failed = self.has_failed or task in self.sharing
            self.holding.discard(task)
            self.sharing.discard(task)
            self.pool.add(worker.held)
            self.left_over.add(worker.held)
            self.records.drop(self._key(task))
            self._save()
        return replies

    def answer_waiting(self) -> list[SendReply]:
        """Answer all waiting requests that can be answered now."""
        replies = []
        for task, ask in list(self.waiting.items()):
            # Claimed steps may still return to the pool.
            if not self.pool and self.holding:
                break
            steps = self._take(self.workers[task])
            del self.waiting[task]
            self._save(msgspec.structs.replace(self.workers[task], first=steps.start, count=len(steps), answered=True))
            replies.append(SendReply(ask, Claimed(steps.start, len(steps), self.sums)))
        return replies

    def _take(self, worker: _Worker) -> range:
        """Return the next claim of a worker."""
        share = len(self.pool) // (SHARE_DIVISOR * len(self.sharing))
        most = min(LARGEST_CLAIM, int(CLAIM_WORK_S / worker.step_s)) if worker.step_s > 0 else FIRST_CLAIM
        count = max(1, min(max(most, worker.least), share))
        if not self.pool:
            return range(self.total_steps, self.total_steps)
        first = next(self.pool.ranges()).start
        if first in self.left_over:
            count = 1
        else:
            left_over = next((part.start for part in self.left_over.ranges() if part.start > first), self.total_steps)
            count = min(count, left_over - first)
        return self.pool.take(count)

    def record(self, *, is_copy: bool = False) -> _RunRecord:
        """Return the run without its workers; with `is_copy`, the steps that they hold are in the pool."""
        if not is_copy:
            pool, left_over = self.pool, self.left_over
        else:
            held = (self.workers[task].held for task in self.holding)
            pool, left_over = IndexSet([*self.pool.ranges(), *held]), IndexSet()
        return _RunRecord(
            self.total_steps, self.done, _pairs(pool), _pairs(left_over), sums=self.sums, is_training=self.is_training
        )

    def return_to(self, copy: _RunRecord) -> None:
        """Return to a copy of the run."""
        self.done, self.pool, self.left_over, self.sums = copy.done, _index_set(copy.pool), IndexSet(), copy.sums
        for task, worker in list(self.workers.items()):
            is_waiting = task in self.waiting
            void = msgspec.structs.replace(worker, first=0, count=0, done=0, answered=not is_waiting, is_void=True)
            self._save(void)
        self._save()

    def _save(self, worker: _Worker | None = None) -> None:
        self.records.put(_RUN + self.name, self.record())
        if worker is not None:
            self.note(worker)
            self.records.put(self._key(worker.task), _WorkerRecord(self.name, worker))

    def _key(self, task: str) -> str:
        return f"{_WORKER}{task}\n{self.name}"


def _pairs(numbers: IndexSet) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in numbers.ranges())


def _index_set(pairs: Iterable[tuple[int, int]]) -> IndexSet:
    return IndexSet(range(*pair) for pair in pairs)


_NOT_FINITE = "not finite/"
_PROGRESS = "progress/"
_RUN = "run/"
_WORKER = "worker/"
