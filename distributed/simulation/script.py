"""Scripts of simulated processes: generators that yield each of their waits.

Why: a script reads like the blocking program that it simulates, and every wait has a deadline by construction.
Invariant: a wait ends once, by its outcome or by its deadline, whichever comes first. The script of a process that has
ended does not continue.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from dflow.distributed.simulation.events import EventQueue, Timer
from dflow.distributed.simulation.network import Process
from dflow.tracing.errors import DeadlineExceeded

Resolve = Callable[[Any], None]


@dataclass(frozen=True)
class Wait:
    """A wait for `what`, with a deadline after `timeout_s`; with `what` empty, the time-out is no error.

    `start`     begins the operation; it gets a callback to end the wait with a value, or with an error to raise
    `withdraw`  called when the deadline ends the wait
    """

    what: str
    timeout_s: float
    start: Callable[[Resolve], None]
    withdraw: Callable[[], None] = lambda: None


Script = Generator[Wait, Any, Any]


def sleep(seconds: float) -> Wait:
    """Return a wait that ends after `seconds`."""
    return Wait("", seconds, lambda resolve: None)


class Running:
    """A script running in a process. `waits_until_s` is the deadline of its present wait, None once it has ended."""

    def __init__(self, events: EventQueue, process: Process, script: Script) -> None:
        self.waits_until_s: float | None = None
        self.waits_for = ""
        self._events = events
        self._process = process
        self._script = script
        self._number = 0
        self._timer: Timer | None = None
        self._is_running = False
        process.on_end.append(self.end)
        process.post(lambda: self._go_on(None))

    def end(self) -> None:
        """Stop the script at its present wait."""
        self._number += 1
        self.waits_until_s = None
        if self._timer is not None:
            self._timer.stop()
        if not self._is_running:
            self._script.close()

    def _go_on(self, outcome: object) -> None:
        self._is_running = True
        try:
            if isinstance(outcome, BaseException):
                wait = self._script.throw(outcome)
            else:
                wait = self._script.send(outcome)
        except StopIteration:
            self.waits_until_s = None
            return
        finally:
            self._is_running = False
        self._wait(wait)

    def _wait(self, wait: Wait) -> None:
        self._number += 1
        number = self._number
        self.waits_until_s, self.waits_for = self._events.now_s + wait.timeout_s, wait.what

        def resolve(outcome: object) -> None:
            if number == self._number and self._process.is_alive:
                self._number += 1
                timer.stop()
                self._process.post(lambda: self._go_on(outcome))

        late = DeadlineExceeded(f"waited {wait.timeout_s:g} s for {wait.what}") if wait.what else None

        def expire() -> None:
            wait.withdraw()
            resolve(late)

        self._timer = timer = self._events.after(wait.timeout_s, expire)
        try:
            wait.start(resolve)
        except Exception as error:
            resolve(error)
