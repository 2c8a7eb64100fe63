"""A task's answers to tools that watch it: its clock, its state, all events of some steps, and its functions.

Invariant: a trace that no tool stops ends after its deadline, so that a task whose tracer has died then keeps no more
events than before, and waits for no more results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import msgspec

from dflow.distributed.transport.base import Reply
from dflow.distributed.wire.codec import Payload
from dflow.distributed.wire.messages.functions import (
    FunctionData,
    FunctionRequest,
    ListFunctions,
    ListTraces,
    ReadGraph,
)
from dflow.distributed.wire.messages.message import Answer, Message, Request
from dflow.distributed.wire.messages.observing import (
    ClockTold,
    GetClock,
    GetTaskState,
    StartTrace,
    StopTrace,
    TaskState,
    TaskUsage,
    TraceTold,
)
from dflow.lowering.queues.timers import Stoppable, start_timer
from dflow.lowering.steps.recorder import Recorder
from dflow.tracing.errors import GraphNameError, WireError

#: Limits of a trace: number of events kept, and duration in s.
MOST_EVENTS = 1_000_000
LONGEST_S = 3600.0

Observation = GetClock | StartTrace | StopTrace | GetTaskState | ListFunctions | ListTraces | ReadGraph
#: Observations that take too long for a reader thread.
ON_THREADS: tuple[type[Observation], ...] = (StartTrace, StopTrace, GetTaskState, ListFunctions, ListTraces, ReadGraph)


def no_functions(message: FunctionRequest) -> bytes:
    """Answer, as JSON, for a process that runs no code of the user. Raises GraphNameError for any function."""
    if isinstance(message, ListFunctions):
        return b'{"functions":[],"left_out":0}'
    raise missing_function(message.id)


def missing_function(number: int) -> GraphNameError:
    """Return the error for a function that this process does not keep, or no longer."""
    return GraphNameError(
        f"function {number}: expected one that this process keeps, got a number of none", "list its functions again"
    )


class TaskObserver:
    """Answers observations of the task whose events are in `recorder`; thread-safe.

    `state`, `usage`  return the task's state without its usage, and its usage
    """

    def __init__(
        self, recorder: Recorder, state: Callable[[], TaskState], usage: Callable[[], TaskUsage | None] = lambda: None
    ) -> None:
        self._recorder, self._state, self._usage = recorder, state, usage
        #: Answers for the compiled functions of the process; the layer `dflow` sets another one. Thread-safe.
        self.functions: Callable[[FunctionRequest], bytes] = no_functions
        self._lock = threading.Lock()
        self._ends: Stoppable | None = None

    def answer(self, message: Observation) -> tuple[Message, Payload]:
        """Carry out an observation, such as the start or end of a trace; return the answer with its payload.

        raises  WireError for a trace over the limits; GraphNameError for a function or graph that is not kept
        """
        match message:
            case GetClock():
                return ClockTold(self._recorder.clock()), b""
            case StartTrace():
                return self._start(message), b""
            case StopTrace(since_ns):
                lost = self._recorder.is_full
                self._end()
                events = self._recorder.events(since_ns)
                self._recorder.keep(0)
                return TraceTold(lost), msgspec.msgpack.encode(events)
            case GetTaskState(usage):
                state = self._state()
                return (msgspec.structs.replace(state, usage=self._usage()) if usage else state), b""
            case ListFunctions() | ListTraces() | ReadGraph():
                return FunctionData(), self.functions(message)

    def call(self, message: Request[Answer], *, timeout_s: float) -> Reply[Answer]:
        """Answer a tracer in this process, like `Peer.call`; `timeout_s` is ignored."""
        assert isinstance(message, Observation)
        answer, payload = self.answer(message)
        return Reply(cast(Answer, answer), memoryview(payload))

    def _start(self, message: StartTrace) -> ClockTold:
        if not (0 <= message.events <= MOST_EVENTS and 0 < message.longest_s <= LONGEST_S):
            raise WireError(
                f"a trace of {message.events} events within {message.longest_s:g} s was asked for; at most "
                f"{MOST_EVENTS} within {LONGEST_S:g} s are kept"
            )
        self._end()
        with self._lock:
            self._recorder.keep(message.events)
            self._recorder.watch()
            self._ends = start_timer(message.longest_s, self._give_up)
        return ClockTold(self._recorder.clock())

    def _give_up(self) -> None:
        self._recorder.unwatch()
        self._recorder.keep(0)

    def _end(self) -> None:
        with self._lock:
            if self._ends is not None:
                self._ends.stop()
                self._ends = None
            self._recorder.unwatch()
