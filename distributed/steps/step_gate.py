"""The gate of a task's shared steps: closed while the state of all tasks is captured or set (`step_pauses`).

A pause waits for the steps that run. So code within a step must not wait for the end of a pause, such as that of a
return to a snapshot: `is_in_step` tells it to fail the step instead, and the step's loop waits after it has left.

A trace and a compilation may take minutes, and change no state of tasks. A pause does not wait for a step that does
only that: `preparing` lets the step leave the gate, and enter it again before it uses a task. Invariant: a step that
has used a task, even to read, stays within the gate to its end, so that all it does is before a pause or after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded

_step: ContextVar[RunningStep | None] = ContextVar("dflow_step", default=None)
#: By thread, the name of the function that it traces or compiles for a call.
_prepared: dict[int, str] = {}


def is_in_step() -> bool:
    """Whether the caller is within a shared step: a pause of the steps waits for its end."""
    return _step.get() is not None


def uses_tasks() -> None:
    """Keep the caller's step within the gate to its end, since it now reads or changes state of tasks.

    Enters the gate, after a pause, if a preparation that failed has left it. Does nothing outside a step, and in a
    preparation. Raises DeadlineExceeded if the pause lasts too long.
    """
    step = _step.get()
    if step is not None and not step.has_begun and threading.get_ident() not in _prepared:
        step.enter()
        step.has_begun = True


def begins_parts() -> None:
    """Like `uses_tasks`, but also in a preparation: enter the gate, and have pauses wait for the preparation too.

    Raises DeadlineExceeded if a pause lasts too long.
    """
    step = _step.get()
    if step is not None and not step.has_begun:
        step.enter()
        step.has_begun = True


@contextmanager
def preparing(name: str) -> Iterator[None]:
    """Return the context of a trace and a compilation of the function `name`, which `prepared` then describes.

    The caller's step leaves the gate, so that pauses do not wait for it, unless it has used tasks before. It enters
    again at the end, unless an error ends the context. Raises DeadlineExceeded then if a pause lasts too long. Does
    nothing within another such context.
    """
    thread, step = threading.get_ident(), _step.get()
    if thread in _prepared:
        yield
        return
    _prepared[thread] = name
    if step is not None and not step.has_begun:
        step.leave()
    try:
        yield
    finally:
        del _prepared[thread]
    if step is not None:
        step.enter()


def prepared() -> str:
    """Describe the functions that this process traces or compiles for its calls; empty if there are none."""
    names = [*_prepared.values()]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{PREPARES}{names[0]}{more}" if names else ""


#: Beginning of the description of a trace or a compilation.
PREPARES = "tracing and compiling "


@dataclass(eq=False)
class RunningStep:
    """A shared step on the thread of its loop.

    is_counted  whether it is within the gate
    has_begun   whether it has used tasks
    """

    gate: StepGate
    timeout_s: float
    is_counted: bool = False
    has_begun: bool = False

    def enter(self) -> None:
        """Wait until the gate is open and enter it, unless the step is within it. Raises DeadlineExceeded."""
        if not self.is_counted:
            self.gate.enter_in_time(self.timeout_s)
            self.is_counted = True

    def leave(self) -> None:
        """Leave the gate, if the step is within it."""
        if self.is_counted:
            self.is_counted = False
            self.gate.leave()


class StepGate:
    """Counts the shared steps that the task `task` runs, and holds back new ones in a pause; thread-safe."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._running = 0
        #: Called when the last step ends, while the gate is closed; None while it is open.
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
        """Let later steps begin, and call the `when_open` of each step that was held back."""
        with self._lock:
            self._on_idle = None
            waiting, self._waiting = self._waiting, []
        for begin in waiting:
            begin()

    def enter(self, when_open: Callable[[], object]) -> bool:
        """Count a step and return true if it may begin now; else call `when_open` once, when the gate opens."""
        with self._lock:
            if self._on_idle is None:
                self._running += 1
                return True
            self._waiting.append(when_open)
            return False

    def leave(self) -> None:
        """Count a step that entered as ended; after the last one, call `on_idle` if the gate is closed."""
        with self._lock:
            self._running -= 1
            on_idle = self._on_idle if self._running == 0 else None
        if on_idle is not None:
            on_idle()

    @contextmanager
    def step(self, timeout_s: float) -> Iterator[None]:
        """Return the context of a shared step, which begins when the gate is open; see `enter_in_time`."""
        step = RunningStep(self, timeout_s)
        step.enter()
        try:
            # As `context_values.within`, without a second context manager in each step.
            token = _step.set(step)
            try:
                yield
            finally:
                _step.reset(token)
        finally:
            step.leave()

    def enter_in_time(self, timeout_s: float) -> None:
        """Wait until the gate is open, and count a step. Raises DeadlineExceeded after `timeout_s`."""
        may_try, until_s = threading.Event(), 0.0
        while not self.enter(may_try.set):
            until_s = until_s or time.monotonic() + timeout_s
            if not may_try.wait(until_s - time.monotonic()):
                raise DeadlineExceeded(
                    f"{short_task_name(self._task)} has held back its next step for {timeout_s:g} s, while the state "
                    "of all tasks is saved or restored",
                    "see the coordinator's output, and that of a task that saves",
                )
            may_try.clear()
