"""Steps of a training run: claims of them by workers, their staleness, and synchronous steps, called rounds."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.connection import ArrayInfo, Ok
from dflow.distributed.wire.messages.message import Marked, Message, Notice, Request
from dflow.tracing.devices.task_name import short_task_name


class NotFinite(msgspec.Struct, frozen=True):
    """The first loss of a run, by name, that was not a finite number, with its step and worker."""

    step: int
    metric: str
    value: float
    run: str = ""
    task: str = ""


class Claimed(Marked, frozen=True):
    """Steps `first` to `first + count - 1`; a count of 0: all steps are done, or the claim had `more` false.

    `sums`  sums by name over all steps of the run that are done, as claims reported them
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
    `has_failed` whether the worker leaves the run by an error, or its loop, perhaps by one; its output may show it
    """

    speaker = "task"

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


class StepAdmitted(Message, frozen=True):
    """A step may begin, after `version` ended steps of the run.

    `uses_held`  whether the values that were fetched for it are new enough
    `workers`    number of workers that take part
    `roster`     version of the roster whose deaths the step's messages must come after
    """

    version: int
    uses_held: bool
    workers: int
    roster: int


class BeginStep(Request[StepAdmitted], frozen=True):
    """Request that the worker's next step may begin; its earlier one has ended. See `steps.staleness`.

    `number`     of the step, greater than those of the worker's earlier ones; the same if it asks again
    `limit`      `max_staleness` of the run
    `held`       version of the values that were fetched for the step already; None if there are none
    `timeout_s`  longest wait, after which the request is refused and keeps its place
    """

    speaker = "worker"

    run: str
    worker: str
    number: int
    limit: int
    held: int | None
    timeout_s: float


class EndStep(Notice, frozen=True):
    """The worker's step `number` has ended, or it no longer asks for it; `is_last` if it begins no other."""

    speaker = "worker"

    run: str
    worker: str
    number: int
    is_last: bool = False


class RoundsAgreed(Message, frozen=True):
    """Number of gradients per round, name of the run's accumulator, and whether all rounds are done."""

    wanted: int
    accumulator: str
    is_over: bool


class ProposeRounds(Request[RoundsAgreed], frozen=True):
    """Register a worker in a run of synchronous training; answered by `RoundsAgreed`, the same for every worker.

    A run has `rounds` synchronous steps, called rounds. The first worker fixes `wanted`, the number of gradients per
    round, the name of the accumulator, and the `others`, the tasks with a further accumulator of the run, by the names
    of `accumulator_on`. The number of returns to a snapshot is appended to a name, and a number if another run uses it.
    """

    speaker = "worker"

    name: str
    worker: str
    rounds: int
    wanted: int
    accumulator: str
    others: tuple[str, ...] = ()


def accumulator_on(task: str, name: str) -> str:
    """Return the name of the accumulator on another task of the run whose accumulator is `name`."""
    return f"{name}/{short_task_name(task)}"


class OpenRounds(Request[Ok], frozen=True):
    """Become the step aggregator (round host) of a run, unless it is open here.

    In each of `rounds` rounds this task takes the mean of `wanted` gradients from the accumulator. It then starts the
    update, a step over the registered plans `handles` (by task). In this step the other tasks take the mean of the same
    gradients. The payload holds the arrays fed `before` the mean and those fed `after` it. `workers` take part. The
    accumulator is held under `key`, which has the worker's container before its name. `epoch` is the number of returns
    of all tasks to a snapshot before the plans were registered.
    """

    name: str
    rounds: int
    wanted: int
    workers: tuple[str, ...]
    accumulator: str
    key: str
    handles: dict[str, int]
    before: tuple[ArrayInfo, ...] = ()
    after: tuple[ArrayInfo, ...] = ()
    epoch: int = 0


class RoundOpen(Message, frozen=True):
    """The number of the open round, which tags its gradients, and the count of rounds `done` (all: the run is over)."""

    number: int
    done: int


class NextRound(Request[RoundOpen], frozen=True):
    """A worker is done with the round opening number `done` (-1: none yet); answered by `RoundOpen` of a later one.

    `accumulator`  the run's, as agreed when the worker opened it; refused as TaskLost if the run has another one now
    """

    speaker = "worker"

    name: str
    worker: str
    done: int
    accumulator: str
    timeout_s: float


class RoundsLeft(Message, frozen=True):
    """A worker has left a run; if it was the last one, the run's accumulators are freed on all tasks."""


class LeaveRounds(Request[RoundsLeft], frozen=True):
    """A worker stops taking part; it has sent its gradients for the openings up to `done` to this accumulator."""

    speaker = "worker"

    name: str
    worker: str
    done: int
    accumulator: str


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
