"""Collection of the events of some steps from all tasks of a cluster.

Each task records its own events; the steps send nothing more than without a trace. The clocks are sampled before and
after the steps, so that their offsets apply to the middle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from dflow.distributed.observe.clock_alignment import ClockSample, Offset, align
from dflow.distributed.observe.step_times import MessageTimes, StepTimes, message_times, step_times
from dflow.distributed.observe.trace_file import crossings, first_steps, trace_of
from dflow.distributed.process.run_folder import write_whole_file
from dflow.distributed.transport.base import Peer, Reply
from dflow.distributed.wire.messages.message import Answer, Request
from dflow.distributed.wire.messages.observing import GetClock, GetTaskState, StartTrace, StopTrace
from dflow.lowering.steps.step_events import Event
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError

if TYPE_CHECKING:
    # It imports JAX, and the tools that trace a cluster start without it.
    from dflow.distributed.observe.task_observer import TaskObserver

#: Events that a task keeps during a trace.
EVENTS = 200_000
#: Number of samples of each clock, before and after.
TRIPS = 20
ANSWER_S = 30.0
POLL_S = 0.02


@dataclass(frozen=True)
class Trace:
    """A finished trace.

    `events`   by task, timed by its clock
    `offsets`  of the tasks' clocks from ours
    `lost`     tasks whose earliest events were overwritten
    `missing`  errors of the tasks that did not answer
    """

    events: Mapping[str, list[Event]]
    offsets: Mapping[str, Offset]
    lost: tuple[str, ...]
    missing: Mapping[str, str]

    def json(self) -> bytes:
        """Encode the trace in the Trace Event Format."""
        return msgspec.json.encode(trace_of(self.events, self.offsets))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, atomically, in the Trace Event Format."""
        write_whole_file(path, self.json())

    def step_times(self) -> list[StepTimes]:
        """Return how the time of steps divides, a row for each starting job and each task; see `step_times.py`."""
        return step_times(self.events, self.offsets)

    def message_times(self) -> list[MessageTimes]:
        """Return the sizes and times of messages, a row for each edge and pair of tasks, most bytes per step first."""
        return message_times(self.events, self.offsets)

    @property
    def steps(self) -> int:
        """Number of steps in the trace."""
        return len({(event.origin, event.step) for own in self.events.values() for event in own if event.origin})


class Tracer:
    """Traces `tasks` from construction until `stop`; a task that does not answer, or refuses, is left out.

    `longest_s`  time after which tasks end the trace by themselves
    """

    def __init__(self, tasks: Mapping[str, Peer | TaskObserver], *, longest_s: float = 600.0) -> None:
        self._tasks = dict(tasks)
        self._missing: dict[str, str] = {}
        self._samples: dict[str, list[ClockSample]] = {}
        self._ask_clocks()
        self._began_ns = {task: told.at_ns for task, told in self._ask_all(StartTrace(EVENTS, longest_s)).items()}
        self._before = self._ask_all(GetTaskState())

    def wait_for_steps(self, steps: int, timeout_s: float) -> None:
        """Wait until each task that starts steps has ended `steps` since the beginning of the trace, and one more.

        After `timeout_s` return with fewer; raises DeadlineExceeded if no step has ended by then.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            done = {
                task: state.steps - self._before[task].steps
                for task, state in self._ask_all(GetTaskState()).items()
                if state.steps > self._before[task].steps or (state.running and state.steps)
            }
            if done and min(done.values()) > steps:  # one may have begun before the trace
                return
            if time.monotonic() > deadline:
                if any(done.values()):
                    return
                who = ", ".join(short_task_name(task) for task in self._tasks)
                raise DeadlineExceeded(f"no step was ended within {timeout_s:g} s by any of {who}, so none is traced")
            time.sleep(POLL_S)

    def stop(self, steps: int | None = None) -> Trace:
        """End the trace; return the first `steps` complete steps that each task started, or all steps."""
        events: dict[str, list[Event]] = {}
        lost = []
        for task in tuple(self._tasks):
            found = self._ask(task, StopTrace(self._began_ns[task]))
            if found is not None:
                told, payload = found
                events[task] = msgspec.msgpack.decode(payload, type=list[Event])
                lost += [task] if told.lost else []
        self._ask_clocks()
        events = first_steps({task: own for task, own in events.items() if task in self._samples}, steps)
        offsets = align({task: self._samples[task] for task in events}, crossings(events))
        return Trace(events, offsets, tuple(lost), dict(self._missing))

    def _ask_clocks(self) -> None:
        for task in tuple(self._tasks):
            for _ in range(TRIPS):
                asked_ns = time.monotonic_ns()
                found, heard_ns = self._ask(task, GetClock()), time.monotonic_ns()
                if found is None:
                    break
                self._samples.setdefault(task, []).append((asked_ns, found.message.at_ns, heard_ns))

    def _ask_all(self, message: Request[Answer]) -> dict[str, Answer]:
        found = {task: self._ask(task, message) for task in tuple(self._tasks)}
        return {task: answer.message for task, answer in found.items() if answer is not None}

    def _ask(self, task: str, message: Request[Answer]) -> Reply[Answer] | None:
        try:
            return self._tasks[task].call(message, timeout_s=ANSWER_S)
        except DflowError as error:
            del self._tasks[task]
            self._missing[task] = str(error)
            return None
