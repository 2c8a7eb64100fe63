"""The parts of one step, each on another task, as seen by the task that started the step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from dflow.distributed.transport.base import Peer, Reply
from dflow.distributed.wire.messages.connection import Ok
from dflow.distributed.wire.messages.plans import CancelStep
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DflowError


class StepParts:
    """Calls `on_over` once, from any thread: with the first error, or with this task's outcome when all have ended."""

    def __init__(self, tasks: Iterable[str], on_over: Callable[[Outcome[Fetches]], None]) -> None:
        self._on_over = on_over
        self._lock = threading.Lock()
        self._running = {*tasks}
        self._outcome: Outcome[Fetches] = ()

    @property
    def running(self) -> list[str]:
        """The tasks whose parts have not ended, by name."""
        with self._lock:
            return sorted(self._running)

    def ended(self, task: str, outcome: Outcome[Fetches] | Reply[Ok]) -> None:
        """Record that the part of `task` has ended; later calls after an error do nothing."""
        with self._lock:
            if not self._running:
                return
            self._running.discard(task)
            if isinstance(outcome, BaseException):
                self._outcome = outcome
                self._running.clear()
            elif not isinstance(outcome, Reply):
                self._outcome = outcome
            if self._running:
                return
        self._on_over(self._outcome)


def cancel_elsewhere(step: StepId, peers: Iterable[Peer], error: BaseException) -> None:
    """Notify other tasks that their parts of a step are cancelled."""
    message = CancelStep(step.origin, step.number, f"{type(error).__name__}: {error}")
    for peer in peers:
        with contextlib.suppress(DflowError):  # the task is gone, and its part with it
            peer.notify(message)
