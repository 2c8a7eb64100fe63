"""Task-initiated steps: a task starts them over plans that workers have registered, and no worker's loss ends them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from dflow.distributed.steps.step_numbers import first_of_a_life
from dflow.distributed.steps.step_parts import StepParts, cancel_elsewhere
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.plans import RunPlan
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DflowError

OnEnd = Callable[[BaseException | None], None]


class StepStarter(Protocol):
    """The part of a task server that is used here."""

    name: str

    def peer(self, task: str) -> Peer:
        """Return the connection to another task."""
        ...

    def run(self, handle: int, step: StepId, feeds: Sequence[Any], on_done: Callable[[Outcome[Fetches]], None]) -> None:
        """Run a registered plan as this task's part of a step."""
        ...

    def cancel(self, step: StepId, error: BaseException) -> None:
        """End this task's part of a step with `error`."""
        ...


class TaskInitiatedSteps:
    """The steps that `server` initiates."""

    def __init__(self, server: StepStarter) -> None:
        self._server = server
        self._numbers = itertools.count(first_of_a_life() + 1)

    def start(self, handles: Mapping[str, int], feeds: Sequence[Any], on_end: OnEnd) -> None:
        """Run the plans `handles`, by task, as one step; `feeds` are for this task's plan.

        `on_end` is called once, from any thread: with None when all parts have ended, or with the first error. May
        block while connecting.
        """
        step = StepId(self._server.name, next(self._numbers))
        parts = StepParts(handles, partial(self._over, step, [*handles], on_end))
        try:
            for task, handle in handles.items():
                if task != self._server.name:
                    peer = self._server.peer(task)
                    peer.start(RunPlan(handle, step.origin, step.number), on_reply=partial(parts.ended, task))
            self._server.run(handles[step.origin], step, feeds, partial(parts.ended, step.origin))
        except Exception as error:
            parts.ended(step.origin, error)

    def _over(self, step: StepId, tasks: Sequence[str], on_end: OnEnd, outcome: Outcome[Fetches]) -> None:
        error = outcome if isinstance(outcome, BaseException) else None
        if error is not None:
            self._server.cancel(step, error)
            cancel_elsewhere(step, self._peers(tasks), error)
        on_end(error)

    def _peers(self, tasks: Sequence[str]) -> Iterator[Peer]:
        for task in tasks:
            if task != self._server.name:
                with contextlib.suppress(DflowError):  # the task is gone, and its part with it
                    yield self._server.peer(task)
