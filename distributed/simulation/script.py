"""What a process asks for, one thing after another, as a generator that yields each wait.

Why: scripts read like the blocking programs that they stand for, and every wait has a deadline by construction.
Invariant: a wait ends once, by what it waits for or by its deadline, whichever is first; the script of a process that
has ended does not go on.
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
    """`start` begins what is waited for, and is given what ends it: a value, or the error to raise.

    `withdraw`  is called when the deadline ends it
    """

    what: str
    timeout_s: float
    start: Callable[[Resolve], None]
    withdraw: Callable[[], None] = lambda: None


Script = Generator[Wait, Any, Any]


def sleep(seconds: float) -> Wait:
    """Wait for nothing."""
    return Wait("", seconds, lambda resolve: None)


class Running:
    """A script that runs in a process. `waits_until_s` is the deadline of its wait, None when it has ended."""

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
        """Stop where it is."""
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
