"""Claims of a run's steps by workers."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.message import Marked, Request


class NotFinite(msgspec.Struct, frozen=True):
    """The first loss of a run, by name, that was not a finite number, with its step and worker."""

    step: int
    metric: str
    value: float
    run: str = ""
    task: str = ""


class Claimed(Marked, frozen=True):
    """Steps `first` to `first + count - 1`; a count of 0: all steps are done, or the claim had `more` false."""

    first: int
    count: int

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
