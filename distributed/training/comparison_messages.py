"""Messages that describe the steps of the workers of a run, for the coordinator to compare."""

from __future__ import annotations

from dflow.distributed.wire.messages.message import Message, Notice, Request


class StepCompared(Message, frozen=True):
    """The step is that of the run's other workers, unless `is_known` is false: then the items are needed."""

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
    """The workers of a run have other steps, as `text` says, so each of them ends the run with a StrategyError."""

    run: str
    text: str
