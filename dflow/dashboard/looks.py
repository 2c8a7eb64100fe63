"""Looks at a running cluster, and what two of them tell of each task.

The coordinator reports membership, heartbeats and traffic; each task reports its own state. Rates are differences, so
they need two looks.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from msgspec.structs import astuple, replace

from dflow.dashboard.observing import ClusterObserver, live_tasks
from dflow.distributed.wire.messages.observing import GetTaskState, TaskState, TaskUsage
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.distributed.wire.messages.status import Status, TaskHealth, VariableInfo
from dflow.tracing.devices.task_name import split_task_name
from dflow.tracing.errors import DflowError

#: Time between two looks, in s.
LOOK_S = 1.0
#: Longest wait for an answer of a task, in s.
TASK_S = 2.0
#: A straggler's step time is more than this multiple of its job's median.
SLOW = 1.5
#: A task without a heartbeat for longer than this, in s, is shown as silent; heartbeats come every second.
SILENT_S = 3.0
RATE_WINDOW_S = 5.0
_LETTER = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


@dataclass(frozen=True)
class Look:
    """A look: the coordinator's status, and the states of the tasks that answered, by full task name."""

    at_s: float
    status: Status
    states: Mapping[str, TaskState]


def look(observer: ClusterObserver, pool: Executor) -> Look:
    """Take a look. Tasks that do not answer within `TASK_S` are left out."""
    status = observer.status()
    live = live_tasks(status)
    answers = zip(live, pool.map(partial(_state_of, observer), live), strict=True)
    states = {info.task: state for info, state in answers if state is not None}
    return Look(time.monotonic(), status, states)


def _state_of(observer: ClusterObserver, info: TaskInfo) -> TaskState | None:
    try:
        return observer.peer(info, TASK_S).call(GetTaskState(usage=True), timeout_s=TASK_S).message
    except (DflowError, OSError, ValueError):
        return None


def stragglers(states: Mapping[str, TaskState]) -> dict[str, float]:
    """Return the tasks whose step time is more than `SLOW` times their job's median, with that ratio."""
    found: dict[str, float] = {}
    times: dict[str, dict[str, float]] = {}
    for task, state in states.items():
        if state.step_s:
            times.setdefault(split_task_name(task)[0], {})[task] = state.step_s
    for of_job in times.values():
        # The lower of the two middle values, so that one of two tasks can be a straggler.
        median = statistics.median_low(of_job.values())
        found |= {task: time_s / median for task, time_s in of_job.items() if time_s > SLOW * median}
    return found


class Condition(NamedTuple):
    """State of a task as one word, how it is marked (ok, warn, bad or off), and the text to show."""

    state: str
    level: str
    text: str

    @property
    def is_good(self) -> bool:
        return self.level == "ok"


def condition(info: TaskInfo, known: TaskHealth | None, slow: Mapping[str, float], now: Look) -> Condition:
    """Return the condition of a live task.

    known  its newest heartbeat, if there was one
    slow   the stragglers of the look `now`; see `stragglers`
    """
    if info.task in now.status.away:
        return Condition("away", "warn", "away")
    if known is not None and known.stalled_since_s is not None:
        return Condition("stalled", "bad", f"stalled for {now.status.now_s - known.stalled_since_s:.0f} s")
    if known is not None and now.status.now_s - known.heard_at_s > SILENT_S:
        return Condition("silent", "bad", "silent")
    if info.task not in now.states:
        return Condition("not reached", "warn", "live, not reached")
    if info.task in slow:
        return Condition("straggler", "warn", f"straggler, {slow[info.task]:.1f} x the median")
    return Condition("live", "ok", "live")


def part_use(before: TaskState | None, now: TaskState | None) -> tuple[int, TaskUsage] | None:
    """Return the number of parts of steps that a task ended between two of its states, and what it used.

    None if a state has no usage, or the task was started again in between.
    """
    if before is None or now is None or before.usage is None or now.usage is None:
        return None
    parts = now.parts - before.parts
    used = TaskUsage(*map(operator.sub, astuple(now.usage), astuple(before.usage)))
    if parts < 0 or used.wakeups < 0:
        return None
    # The time of Python's threads is a difference of two clocks, so it may seem to go back a little.
    return parts, replace(used, python_s=max(used.python_s, 0.0))


def steps_worked(status: Status) -> int:
    """Return the number of steps that the workers have reported, those done again and those of each worker too."""
    return sum(worker.steps for worker in status.workers)


class StepRate:
    """Steps per second over the last `RATE_WINDOW_S` seconds, not counting time before the first step."""

    def __init__(self) -> None:
        #: By time, the number of steps seen to be done since the first time.
        self._seen: deque[tuple[float, int]] = deque()
        #: The newest numbers given to `add`.
        self._done = self._worked = 0

    def add(self, now_s: float, done: int, worked: int | None = None) -> float:
        """Add the number of steps done by now, and return the rate up to it; 0 until two numbers are known.

        worked  number of steps that the workers together have reported; more steps than those, in a job that goes on
                from an earlier one, were done before
        """
        worked = done if worked is None else worked
        news = min(done - self._done, worked - self._worked) if self._seen else 0
        self._done, self._worked = done, worked
        counted = self._seen[-1][1] + news if self._seen else 0
        # Fewer steps after a return to a snapshot are a new beginning.
        if not counted or news < 0:
            self._seen.clear()
            counted = 0
        self._seen.append((now_s, counted))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= RATE_WINDOW_S:
            self._seen.popleft()
        then_s, before = self._seen[0]
        return (counted - before) / (now_s - then_s) if now_s > then_s else 0.0


def largest_first(variables: Sequence[VariableInfo]) -> list[VariableInfo]:
    return sorted(variables, key=lambda info: (-info.size_bytes, info.name))


def type_text(info: VariableInfo) -> str:
    """Return the short form of a variable's type, such as `f32[3,3,1,16]`; that of a queue is not shortened."""
    if info.kind != "variable":
        return info.dtype
    word = info.dtype.rstrip("0123456789")
    short = _LETTER[word] + info.dtype[len(word) :] if word in _LETTER else info.dtype
    return f"{short}[{','.join(map(str, info.shape))}]"
