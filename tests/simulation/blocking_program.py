"""Blocking programs of simulated processes.

Why: a program, and the real code that it calls, waits as on a real host. Each program has a thread, but only one thread
of a simulation runs at a time: when the program waits, the simulation goes on until the wait has ended.

Invariant: a wait ends once, by its outcome or by its deadline, whichever comes first. The program of a process that has
ended does not continue: its wait raises `ProcessEnded`, and so does each later one.
"""

from __future__ import annotations

import _thread
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

from dflow.tracing.errors import DeadlineExceeded
from tests.simulation.events import EventQueue, PendingEvent
from tests.simulation.network import Process

Result = TypeVar("Result")


class ProcessEnded(BaseException):
    """Ends the program of a process that has ended."""


class BlockingProgram:
    """The program of a process. `waits_until_s` is the deadline of its present wait, None when it does not wait."""

    def __init__(self, events: EventQueue, process: Process) -> None:
        self.waits_until_s: float | None = None
        self.waits_for = ""
        self._events, self.process = events, process
        self._number = 0
        self._timer: PendingEvent | None = None
        self._is_waiting = self._is_over = self._is_done = False
        self._error: BaseException | None = None
        # Both are held except while the program, or the simulation, is notified that it may go on.
        self._may_run, self._has_paused = threading.Lock(), threading.Lock()
        self._may_run.acquire()
        self._has_paused.acquire()
        process.on_end.append(self.end)

    def start(self, run: Callable[[], None]) -> None:
        """Start `run`, when the process has done what was posted before."""
        self.process.post(partial(self._begin, run))

    def wait(self, what: str, timeout_s: float, future: Future[Result]) -> Result:
        """Wait, in the program, for a future, and return its result.

        raises  DeadlineExceeded after `timeout_s`, when the future is cancelled; what the future raises
        """
        if not self._pause(what, timeout_s, future):
            future.cancel()
            raise DeadlineExceeded(f"waited {timeout_s:g} s for {what}")
        return future.result()

    def sleep(self, seconds: float) -> None:
        """Wait, in the program, for a time."""
        self._pause("", seconds, Future[None]())

    def end(self) -> None:
        """End the program at its present wait, or at the next one."""
        self._is_over = True
        self.waits_until_s = None
        if self._timer is not None:
            self._timer.stop()
        if self._is_waiting:
            self._continue()

    def _begin(self, run: Callable[[], None]) -> None:
        # In a copy of this context, which says how timers are started.
        call = contextvars.copy_context().run
        _thread.start_new_thread(call, (self._main, run))
        self._continue()

    def _main(self, run: Callable[[], None]) -> None:
        CURRENT.set(self)
        self._may_run.acquire()
        try:
            run()
        except ProcessEnded:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._is_over, self.waits_until_s = True, None
            self._has_paused.release()

    def _continue(self) -> None:
        """Let the program run until it waits or ends; raises what it raises.

        An interrupt here leaves the program running: it then ends at its next wait, which `end` leaves alone.
        """
        self._is_waiting = False
        self._may_run.release()
        self._has_paused.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _pause(self, what: str, timeout_s: float, future: Future[Result]) -> bool:
        """Let the simulation go on until the future is done or the deadline has come; return whether it is done."""
        if self._is_over:
            raise ProcessEnded
        self._number += 1
        self._timer = self._events.after(timeout_s, partial(self._resume, self._number, False))
        self.waits_until_s, self.waits_for = self._events.now_s + timeout_s, what
        future.add_done_callback(partial(self._resume, self._number, True))
        self._is_waiting = True
        self._has_paused.release()
        self._may_run.acquire()
        if self._is_over:
            raise ProcessEnded
        return self._is_done

    def _resume(self, number: int, is_done: bool, future: object = None) -> None:
        """The wait of this number has ended; have the process continue the program unless it has continued already."""
        if number != self._number or self._is_over:
            return
        assert self._timer is not None
        self._number += 1
        self._timer.stop()
        self._is_done = is_done
        self.process.post(self._continue)


#: The program that this thread runs.
CURRENT: ContextVar[BlockingProgram] = ContextVar("simulated program")


def end_wait(future: Future[Result], outcome: Result | BaseException) -> None:
    """End the wait for a future with its outcome, unless it has ended."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
