"""Messages between a worker and the task that bounds the staleness of its steps."""

from __future__ import annotations

from dflow.distributed.wire.messages.message import Message, Notice, Request


class StepAdmitted(Message, frozen=True):
    """A step may begin, after `version` ended steps of the run.

    `uses_held`  whether the values that were fetched for it are new enough
    `workers`    number of workers that take part
    `roster`     version of the roster whose deaths the step's messages must come after
    """

    version: int
    uses_held: bool
    workers: int
    roster: int = 0


class BeginStep(Request[StepAdmitted], frozen=True):
    """Request that the worker's next step may begin; its earlier one has ended. See `staleness.py`.

    `number`     of the step, greater than those of the worker's earlier ones; the same if it asks again
    `limit`      `max_staleness` of the run
    `held`       version of the values that were fetched for the step already; None if there are none
    `timeout_s`  longest wait, then the request is refused and keeps its position in the queue
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
