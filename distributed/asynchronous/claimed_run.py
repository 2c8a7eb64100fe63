"""One run whose steps workers claim: its steps that are unclaimed, claimed and done, and its workers.

Invariants: those of `step_claims`, for one run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.training.work_messages import Claimed, ClaimSteps, StepsDone
from dflow.distributed.wire.messages.basic import Failure
from dflow.lowering.values.index_set import IndexSet
from dflow.tracing.devices.task_name import short_task_name

#: Most steps of a claim by a worker whose steps take an unknown time.
FIRST_CLAIM = 16
#: Most steps of any claim.
LARGEST_CLAIM = 1024
#: Longest work in a claim of several steps, as far as the worker's earlier steps tell, in s.
CLAIM_WORK_S = 1.0
#: A claim gets the worker's fair share of the remaining steps divided by this, so that a slow worker's last is small.
SHARE_DIVISOR = 4
#: Beginnings of the keys of its records, and of those of its workers.
RUN, WORKER = "run/", "worker/"


class ClaimingWorker(msgspec.Struct, frozen=True):
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
        """Claimed steps that are not reported as done."""
        return range(self.first + self.done, self.first + self.count)


class ClaimedRunRecord(msgspec.Struct, frozen=True):
    """A run without its workers, in the coordinator's records and in snapshots; see `ClaimedRun`.

    pool, left_over  first step and end of each range
    """

    total_steps: int
    done: int
    pool: tuple[tuple[int, int], ...]
    left_over: tuple[tuple[int, int], ...] = ()
    sums: dict[str, float] = {}
    is_training: bool = True


class WorkerRecord(msgspec.Struct, frozen=True):
    run: str
    worker: ClaimingWorker


@dataclass
class ClaimedRun:
    """One run: the pool of unclaimed steps, its workers, and the waiting requests by task, in order of arrival.

    holding  tasks with claimed steps that are not reported
    sharing  tasks that get a share of the remaining steps
    """

    name: str
    records: DurableRecords
    total_steps: int
    done: int
    pool: IndexSet
    workers: dict[str, ClaimingWorker] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    holding: set[str] = field(default_factory=set)
    sharing: set[str] = field(default_factory=set)
    #: Steps that workers left unreported, or that failed, and that are not done yet: perhaps they are applied on some
    #: tasks only.
    left_over: IndexSet = field(default_factory=IndexSet)
    #: Sums by name over the steps done, as their workers reported them.
    sums: dict[str, float] = field(default_factory=dict)
    is_training: bool = True
    #: Whether the newest claim or report has a failure, or a worker that took part has left since.
    has_failed: bool = False

    def note(self, worker: ClaimingWorker) -> None:
        """Set the state of a worker, in memory only."""
        self.workers[worker.task] = worker
        (self.holding.add if worker.held else self.holding.discard)(worker.task)
        (self.sharing.add if worker.takes_part else self.sharing.discard)(worker.task)

    @property
    def is_abandoned(self) -> bool:
        """Whether unclaimed steps remain, and no worker holds steps or takes part any more."""
        return bool(self.pool) and not self.holding and not self.sharing

    def is_clear(self, asker: str) -> bool:
        """Whether a pause for the task `asker` may begin: no step that was left over is still to be done by others.

        Also true if no other worker takes part. A step that `asker` has claimed counts as done: it asks between two
        steps, although its report may be on its way or lost.
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
        """Return why this claim contradicts the state of the run; empty if it does not."""
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
        """Whether this is the worker's newest claim, sent again; false if a return has made its answer void."""
        worker = self.workers.get(claim.task)
        return worker is not None and worker.number == claim.number and not (worker.is_void and worker.answered)

    def repeat(self, task: str, ask: int, is_held: bool) -> list[SendReply]:
        """Answer a repeated claim as the first time; if it still waits, refuse the request that waits and replace it.

        is_held  whether claims are held back, so that none that waits is answered
        """
        worker = self.workers[task]
        if worker.answered:
            return [SendReply(ask, self._answer(range(worker.first, worker.first + worker.count)))]
        replies = self._refused(task, "RemoteError", f"{short_task_name(task)} has sent this claim again")
        self.waiting[task] = ask
        return replies if is_held else replies + self.answer_waiting()

    def settle(self, claim: ClaimSteps) -> int:
        """End the worker's last claim: its first `claim.done` steps are done, the rest return to the pool.

        Return the number done since its last report: 0 when the worker has not seen the answer to its last claim.
        `ask` must follow, which writes the records.
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

        A report that does not fit this claim is ignored. A step that failed goes to `left_over` until it is done.
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
        """Queue the worker's request for steps; if `more` is false, answer it now and end the worker's part.

        An earlier request of the worker that still waits is refused.
        """
        replies = []
        if claim.task in self.waiting:
            text = f"a later claim of {short_task_name(claim.task)} has taken the place of this one"
            replies = [SendReply(self.waiting.pop(claim.task), Failure("RemoteError", text))]
        known = self.workers.get(claim.task)
        step_s = claim.step_s or (known.step_s if known is not None else 0.0)
        self.sums = {} if claim.drops_sums else self.sums
        made = ClaimingWorker(claim.task, claim.number, answered=not claim.more, takes_part=claim.more, step_s=step_s)
        self._save(msgspec.structs.replace(made, max_staleness=claim.max_staleness, least=claim.least))
        self.has_failed = claim.has_failed
        if claim.more:
            self.waiting[claim.task] = ask
        else:
            replies.append(SendReply(ask, self._answer(range(0))))
        return replies

    def _answer(self, steps: range) -> Claimed:
        return Claimed(steps.start, len(steps), {} if steps else self.sums)

    def _refused(self, task: str, kind: str, text: str) -> list[SendReply]:
        return [SendReply(self.waiting[task], Failure(kind, text))] if task in self.waiting else []

    def leave(self, task: str, reason: str) -> list[SendReply]:
        """Remove a worker that has left the cluster: refuse its request, and return its unreported steps to the pool.

        Other requests that wait for these steps are answered by `answer_waiting`.
        """
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
        """Give steps of the pool to all waiting requests, or none to each if all steps are done.

        They wait while the pool is empty and claimed steps may still return to it.
        """
        replies = []
        for task, ask in list(self.waiting.items()):
            # Claimed steps may still return to the pool.
            if not self.pool and self.holding:
                break
            steps = self._take(self.workers[task])
            del self.waiting[task]
            self._save(msgspec.structs.replace(self.workers[task], first=steps.start, count=len(steps), answered=True))
            replies.append(SendReply(ask, self._answer(steps)))
        return replies

    def _take(self, worker: ClaimingWorker) -> range:
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

    def record(self, *, is_copy: bool = False) -> ClaimedRunRecord:
        """Return the run without its workers; with `is_copy`, the steps that they hold are in the pool."""
        if not is_copy:
            pool, left_over = self.pool, self.left_over
        else:
            held = (self.workers[task].held for task in self.holding)
            pool, left_over = IndexSet([*self.pool.ranges(), *held]), IndexSet()
        return ClaimedRunRecord(
            self.total_steps, self.done, pool.pairs(), left_over.pairs(), sums=self.sums, is_training=self.is_training
        )

    def return_to(self, copy: ClaimedRunRecord) -> None:
        """Set the run to a copy, also in the records. Answered claims become void; waiting requests still wait."""
        self.done, self.pool, self.left_over, self.sums = copy.done, IndexSet.of(copy.pool), IndexSet(), copy.sums
        for task, worker in list(self.workers.items()):
            is_waiting = task in self.waiting
            void = msgspec.structs.replace(worker, first=0, count=0, done=0, answered=not is_waiting, is_void=True)
            self._save(void)
        self._save()

    def _save(self, worker: ClaimingWorker | None = None) -> None:
        self.records.put(RUN + self.name, self.record())
        if worker is not None:
            self.note(worker)
            self.records.put(self._key(worker.task), WorkerRecord(self.name, worker))

    def _key(self, task: str) -> str:
        return f"{WORKER}{task}\n{self.name}"
