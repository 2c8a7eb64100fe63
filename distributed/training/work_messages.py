"""Messages of workers to the coordinator: claims of steps, progress of runs, whole runs of trainers, comparisons."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.message import Marked, Message, Notice, Request
from dflow.distributed.wire.messages.status import NotFinite

#: End of the name of the placement of a run's host of rounds, after the name of the run.
ROUNDS = "/rounds"


class Claimed(Marked, frozen=True):
    """Steps `first` to `first + count - 1`; a count of 0: all steps are done, or the claim had `more` false.

    `sums`  without steps: sums by name over all steps of the run that are done, as claims reported them
    """

    first: int
    count: int
    sums: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def steps(self) -> range:
        """Numbers of the claimed steps."""
        return range(self.first, self.first + self.count)


class ClaimSteps(Request[Claimed], frozen=True):
    """Request steps of a run; answered by `Claimed`, which waits while other workers may return steps.

    `run`        name of the run; the first claim fixes `total_steps`
    `number`     number of this claim, greater than the task's earlier ones; a repeated number gets the same answer.
                 The client sets it, and `last`
    `last`       number of the last claim whose answer the task has seen, 0 for none
    `done`       number of steps of claim `last` that were done
    `step_s`     median duration of a step since the last claim, in s (0 when there was none)
    `metrics`    the worker's newest scalar metrics
    `more`       false when the worker leaves the run: it is answered immediately, with no steps
    `not_finite` first loss of the steps done that is not finite; run and task need not be set
    `max_staleness`  the bound of the worker's steps, the same for all workers of the run; None for none
    `sums`       sums by name over the steps that are `done`, added to those of the run when these steps are counted;
                 only for a run whose workers send no `StepsDone`
    `is_training` whether the run's steps are counted in the status of the cluster; the first claim fixes it
    `least`      number of steps to claim at least, however long they take, up to the worker's share of the rest
    `has_failed` whether the worker leaves the run by an error, or because its program left the loop early
    `drops_sums` whether the run's sums are no longer needed
    """

    speaker, is_numbered, series = "task", True, "run"

    run: str
    task: str
    total_steps: int
    number: int = 0
    last: int = 0
    done: int = 0
    step_s: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    more: bool = True
    not_finite: NotFinite | None = None
    max_staleness: int | None = None
    sums: dict[str, float] = msgspec.field(default_factory=dict)
    is_training: bool = True
    least: int = 1
    has_failed: bool = False
    drops_sums: bool = False


class StepsDone(Notice, frozen=True):
    """The first `done` steps of the worker's claim that begins with step `first` are done, and it does the others now.

    With `has_failed` the step after these has failed, perhaps applied on some tasks only; the worker claims again. The
    other fields are as in `ClaimSteps`, since the last report.
    """

    speaker = "task"

    run: str
    task: str
    first: int
    done: int
    step_s: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    not_finite: NotFinite | None = None
    has_failed: bool = False


class RoundsDone(Notice, frozen=True):
    """Progress of a run of synchronous training, as a worker sees it.

    `rounds`   number of rounds done, of `total_rounds`
    `steps`    number of the worker's steps since its last report; the gradients of `dropped` of them came too late
    `step_s`   duration of a step, in s
    `metrics`  the worker's newest scalar metrics
    `not_finite`  first loss of these steps that is not finite; run and task need not be set
    `undone`   number of returns to a snapshot, as in `StateRestored`, before these rounds: `rounds` no longer counts
               after another one
    """

    speaker = "task"

    run: str
    task: str
    rounds: int
    total_rounds: int
    steps: int
    dropped: int = 0
    step_s: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    not_finite: NotFinite | None = None
    undone: int = 0


class TrainingPlan(Notice, frozen=True):
    """A trainer's run of `total` steps. Runs named `run`, a space and a range of steps, as `fit 50-100`, are its parts.

    `first`    number of steps that earlier programs have done
    `is_over`  whether a callback has ended it before its last step, so that the rest of the steps is not missing
    """

    speaker = "task"

    run: str
    task: str
    first: int
    total: int
    is_over: bool = False


class TrainingEvent(Notice, frozen=True):
    """An evaluation or a checkpoint, by `kind`, after `steps` steps of the run; `metrics` are the evaluation's."""

    speaker = "task"

    run: str
    task: str
    kind: str
    steps: int
    metrics: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def text(self) -> str:
        """Description of the event for people."""
        found = ", ".join(f"{name} {value:.6g}" for name, value in self.metrics.items())
        return f"{self.kind} of run {self.run!r} after {self.steps} steps{': ' if found else ''}{found}"


class StepCompared(Message, frozen=True):
    """The coordinator has accepted the step, unless `is_known` is false: then it needs the items to compare them."""

    is_known: bool


class CompareStep(Request[StepCompared], frozen=True):
    """Compare a step of a worker with those of the run's other workers; refused with StrategyError if it differs.

    `run`     name of the run
    `key`     steps with one key must be equal
    `digest`  of the items
    `items`   descriptions of the variables that the step writes and of the optimizers' settings; empty at first, and
              sent if no worker has sent equal ones
    """

    speaker = "task"

    run: str
    task: str
    key: str
    digest: str
    items: tuple[str, ...] = ()


class RunRefused(Notice, frozen=True):
    """The workers of a run have different steps, as `text` says; each of them ends the run with a StrategyError."""

    run: str
    text: str
