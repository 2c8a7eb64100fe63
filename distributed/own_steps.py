"""Steps that a task starts itself, over plans that others have registered: nobody else's death ends them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from dflow.distributed.messages import CancelStep, RunPlan
from dflow.distributed.step_numbers import first_of_a_life
from dflow.distributed.transport.base import Peer
from dflow.lowering.channel import StepId
from dflow.lowering.execute import Outcome
from dflow.tracing.errors import DflowError

OnEnd = Callable[[BaseException | None], None]


class Server(Protocol):
    """What is needed of the task."""

    name: str

    def peer(self, task: str) -> Peer:
        """The connection to another task."""
        ...

    def run(self, handle: int, step: StepId, feeds: Sequence[Any], on_done: Callable[[Outcome], None]) -> None:
        """Run a registered plan as this task's part of a step."""
        ...

    def cancel(self, step: StepId, error: BaseException) -> None:
        """End this task's part of a step."""
        ...


class OwnSteps:
    """The steps that `server` starts."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._numbers = itertools.count(first_of_a_life() + 1)

    def start(self, handles: Mapping[str, int], feeds: Sequence[Any], on_end: OnEnd) -> None:
        """Run the plans `handles`, by task, as one step; `feeds` are for this task's own.

        `on_end` is called once, from any thread, when all parts have ended, or with the first error. May wait for
        connections.
        """
        step = StepId(self._server.name, next(self._numbers))
        running = _Running(self._server, step, [*handles], on_end)
        try:
            for task, handle in handles.items():
                if task != self._server.name:
                    peer = self._server.peer(task)
                    peer.start(RunPlan(handle, step.origin, step.number), on_reply=partial(running.ended, task))
            self._server.run(handles[step.origin], step, feeds, partial(running.ended, step.origin))
        except Exception as error:
            running.ended(step.origin, error)


class _Running:
    def __init__(self, server: Server, step: StepId, tasks: Sequence[str], on_end: OnEnd) -> None:
        self._server, self._step, self._tasks, self._on_end = server, step, tasks, on_end
        self._lock = threading.Lock()
        self._left = {*tasks}

    def ended(self, task: str, outcome: object) -> None:
        """The part of a task has ended; the first that failed ends the step."""
        with self._lock:
            if not self._left:
                return
            self._left.discard(task)
            error = outcome if isinstance(outcome, BaseException) else None
            if error is not None:
                self._left.clear()
            is_last = not self._left
        if error is not None:
            self._cancel(error)
        if is_last:
            self._on_end(error)

    def _cancel(self, error: BaseException) -> None:
        self._server.cancel(self._step, error)
        message = CancelStep(*self._step, f"{type(error).__name__}: {error}")
        for task in self._tasks:
            if task != self._server.name:
                with contextlib.suppress(DflowError):  # the task is gone, and its part with it
                    self._server.peer(task).notify(message)
