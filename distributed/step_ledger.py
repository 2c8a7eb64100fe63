"""Who does which steps of a run, so that each is done although workers come and go.

A run has `total_steps` steps. Workers claim consecutive ranges of them, large at first and small towards the end
(guided self-scheduling), so that fast workers do more and all end at about the same time.

Invariants, of each run:
- each step is in the pool, in exactly one worker's claim, or done; it becomes done once;
- the steps of a claim that were not reported when its worker leaves, or wants no more, go back to the pool, lowest
  numbers first out;
- an ask is answered exactly once; it waits only while the pool is empty and another worker holds a claim;
- an answer of no steps means that all steps are done, unless the asker wanted no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dflow.distributed.coordinator_events import Reply
from dflow.distributed.messages import Claimed, ClaimSteps, Failure, WorkerProgress
from dflow.tracing.task_name import short_task_name

LARGEST_CLAIM = 16
#: A worker gets this part of its fair share of what remains, so that a slow worker's last claim stays small.
SHARE_DIVISOR = 4


@dataclass(frozen=True)
class StepsAsked:
    """A live worker asked for steps, and reported those of its last claim."""

    ask: int
    claim: ClaimSteps


@dataclass(frozen=True)
class WorkerLeft:
    """A task is no longer part of the cluster, whether or not it took part in a run."""

    task: str
    reason: str


LedgerEvent = StepsAsked | WorkerLeft


class StepLedger:
    """The runs of one cluster, and what each worker has done in them."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._progress: dict[str, WorkerProgress] = {}

    def handle(self, event: LedgerEvent) -> list[Reply]:
        """Take note of the event and answer every ask that can be answered now."""
        match event:
            case StepsAsked(ask, claim):
                return self._ask(ask, claim)
            case WorkerLeft(task, reason):
                return [reply for run in self._runs.values() for reply in run.leave(task, reason)]

    @property
    def steps_done(self) -> int:
        """Steps done in all runs."""
        return sum(run.done for run in self._runs.values())

    @property
    def steps_total(self) -> int:
        """Steps that all runs have, done or not."""
        return sum(run.total_steps for run in self._runs.values())

    def workers(self) -> tuple[WorkerProgress, ...]:
        """What each task that ever claimed has done, by name."""
        return tuple(self._progress[task] for task in sorted(self._progress))

    def _ask(self, ask: int, claim: ClaimSteps) -> list[Reply]:
        run = self._runs.get(claim.run) or _Run(claim.total_steps)
        refusal = run.refusal(claim)
        if refusal:
            return [Reply(ask, Failure("RemoteError", f"run {claim.run!r}: {refusal}"))]
        self._runs[claim.run] = run
        self._note_progress(claim, run.settle(claim))
        return run.ask(claim.task, ask) if claim.more else run.stop(claim.task, ask)

    def _note_progress(self, claim: ClaimSteps, done: int) -> None:
        last = self._progress.get(claim.task, WorkerProgress(claim.task, 0, 0.0, {}))
        self._progress[claim.task] = WorkerProgress(
            claim.task, last.steps + done, claim.step_s or last.step_s, {**last.metrics, **claim.metrics}
        )


@dataclass
class _Run:
    """One run: the pool of steps no one has, the claims, and the asks that wait, by task and in order of asking."""

    total_steps: int
    done: int = 0
    pool: list[range] = field(default_factory=list)
    claims: dict[str, range] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    workers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._give_back(range(self.total_steps))

    def refusal(self, claim: ClaimSteps) -> str:
        """Why this claim contradicts what is known, or empty."""
        who = short_task_name(claim.task)
        if claim.total_steps < 0:
            return f"{who} asks for {claim.total_steps} steps in all; ask for 0 or more"
        if claim.total_steps != self.total_steps:
            return (
                f"it has {self.total_steps} steps and {who} asks for {claim.total_steps}; "
                "let all workers ask for the same number, or name another run"
            )
        held = len(self.claims.get(claim.task, ()))
        if claim.task not in self.waiting and not 0 <= claim.done <= held:
            return f"{who} reports {claim.done} steps done of a claim of {held}"
        return ""

    def settle(self, claim: ClaimSteps) -> int:
        """Take the worker's last claim back: its first steps are done, the rest go to the pool. The steps done."""
        held = self.claims.pop(claim.task, None)
        if held is None:
            return 0
        self.done += claim.done
        self._give_back(held[claim.done :])
        return claim.done

    def ask(self, task: str, ask: int) -> list[Reply]:
        """Let the worker wait for steps, and answer all that can be answered."""
        replies = self._replace(task)
        self.workers.add(task)
        self.waiting[task] = ask
        return replies + self._answer_waiting()

    def stop(self, task: str, ask: int) -> list[Reply]:
        """Count the worker out, tell it so, and answer all that can be answered now."""
        self.workers.discard(task)
        return [*self._replace(task), Reply(ask, Claimed(0, 0)), *self._answer_waiting()]

    def _replace(self, task: str) -> list[Reply]:
        """Refuse the worker's ask that waits, since a later one came."""
        if task not in self.waiting:
            return []
        text = f"a later claim of {short_task_name(task)} has taken the place of this one"
        return [Reply(self.waiting.pop(task), Failure("RemoteError", text))]

    def leave(self, task: str, reason: str) -> list[Reply]:
        """Give the worker's unreported steps back, and answer all that can be answered now."""
        replies = []
        self.workers.discard(task)
        if task in self.waiting:
            text = f"{short_task_name(task)} has left: {reason}"
            replies.append(Reply(self.waiting.pop(task), Failure("TaskLost", text)))
        self._give_back(self.claims.pop(task, range(0)))
        return replies + self._answer_waiting()

    def _answer_waiting(self) -> list[Reply]:
        replies = []
        for task, ask in list(self.waiting.items()):
            if not self.pool and self.claims:
                break
            steps = self._take()
            if steps:
                self.claims[task] = steps
            del self.waiting[task]
            replies.append(Reply(ask, Claimed(steps.start, len(steps))))
        return replies

    def _take(self) -> range:
        if not self.pool:
            return range(self.total_steps, self.total_steps)
        remaining = sum(map(len, self.pool))
        count = max(1, min(LARGEST_CLAIM, remaining // (SHARE_DIVISOR * len(self.workers))))
        steps, rest = self.pool[0][:count], self.pool[0][count:]
        self.pool[:1] = [rest] if rest else []
        return steps

    def _give_back(self, steps: range) -> None:
        """Put steps into the pool, which stays sorted and without two ranges that touch."""
        merged: list[range] = []
        for part in sorted((part for part in (*self.pool, steps) if part), key=lambda part: part.start):
            if merged and merged[-1].stop == part.start:
                merged[-1] = range(merged[-1].start, part.stop)
            else:
                merged.append(part)
        self.pool = merged
