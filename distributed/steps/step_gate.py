"""The gate of a task's shared steps: closed while the state of all tasks is captured or set (`step_pauses`).

A pause waits for the steps that run. So code within a step must not wait for the end of a pause, such as that of a
return to a snapshot: `is_in_step` tells it to fail the step instead, and the step's loop waits after it has left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded

_in_step: ContextVar[bool] = ContextVar("dflow_in_step", default=False)


def is_in_step() -> bool:
    """Whether the caller is within a shared step: a pause of the steps waits for its end."""
    return _in_step.get()


@contextmanager
def inside_step() -> Iterator[None]:
    """Return a context that is within a shared step."""
    token = _in_step.set(True)
    try:
        yield
    finally:
        _in_step.reset(token)


class StepGate:
    """Counts the shared steps that the task `task` runs, and holds back new ones in a pause; thread-safe."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._running = 0
        #: Called when the last step ends, while the gate is closed.
        self._on_idle: Callable[[], None] | None = None
        self._waiting: list[Callable[[], object]] = []

    def close(self, on_idle: Callable[[], None]) -> None:
        """Hold back new steps; call `on_idle` when none runs, now or from the thread that ends the last one."""
        with self._lock:
            self._on_idle = on_idle
            is_idle = self._running == 0
        if is_idle:
            on_idle()

    def open(self) -> None:
        """Let the steps that wait begin, and later ones."""
        with self._lock:
            self._on_idle = None
            waiting, self._waiting = self._waiting, []
        for begin in waiting:
            begin()

    def enter(self, when_open: Callable[[], object]) -> bool:
        """Return whether a step may begin now, and count it; if not, call `when_open` once, to try again then."""
        with self._lock:
            if self._on_idle is None:
                self._running += 1
                return True
            self._waiting.append(when_open)
            return False

    def leave(self) -> None:
        """Count a step that entered as ended."""
        with self._lock:
            self._running -= 1
            on_idle = self._on_idle if self._running == 0 else None
        if on_idle is not None:
            on_idle()

    @contextmanager
    def step(self, timeout_s: float) -> Iterator[None]:
        """Return the context of a step, entered when the gate is open. Raises DeadlineExceeded after `timeout_s`."""
        may_try = threading.Event()
        if not self.enter(may_try.set):
            self._wait(may_try, timeout_s)
        try:
            with inside_step():
                yield
        finally:
            self.leave()

    def _wait(self, may_try: threading.Event, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while True:
            if not may_try.wait(until_s - time.monotonic()):
                raise DeadlineExceeded(
                    f"{short_task_name(self._task)} has held back its next step for {timeout_s:g} s, while the state "
                    "of all tasks is saved or restored",
                    "see the coordinator's output, and that of a task that saves",
                )
            may_try.clear()
            if self.enter(may_try.set):
                return
