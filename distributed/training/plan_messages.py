"""A trainer's reports to the coordinator, for people: the steps of its whole run, its evaluations and checkpoints."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.message import Notice


class TrainingPlan(Notice, frozen=True):
    """Runs named `run`, a space, and their first and last step, as in `fit 50-100`, are parts of one of `total` steps.

    `first`    number of steps that earlier programs have done
    `is_over`  whether a callback has ended it, so that the steps that are not done are not missing
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
        """The event for people."""
        found = ", ".join(f"{name} {value:.6g}" for name, value in self.metrics.items())
        return f"{self.kind} of run {self.run!r} after {self.steps} steps{': ' if found else ''}{found}"
