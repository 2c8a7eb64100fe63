"""Clock, events and counters of a task, for tools that watch it."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.message import Message, Notice, Request


class Dumped(Message, frozen=True):
    """Path of the written file on the task's host; empty when it could not be written."""

    path: str


class DumpEvents(Request[Dumped], Notice, frozen=True):
    """Write the newest events to a file, because something is stuck. `task` is the requester, empty for a person.

    A task answers this request with `Dumped`. The coordinator passes a task's notification on to all other tasks.
    """

    is_open = True

    why: str
    task: str = ""


class ClockTold(Message, frozen=True):
    """Nanoseconds since an arbitrary moment."""

    at_ns: int


class GetClock(Request[ClockTold], frozen=True):
    """Read the clock that times the task's events. Answered by `ClockTold`, immediately."""

    is_open = True


class StartTrace(Request[ClockTold], frozen=True):
    """Keep the last `events` events instead of the usual few, and record when XLA calls end.

    The trace ends at `StopTrace`, or after `longest_s`.
    """

    is_open = True

    events: int
    longest_s: float


class TraceTold(Message, frozen=True):
    """Payload: a msgpack list of `lowering.steps.step_events.Event`. `lost`: whether older events were overwritten."""

    lost: bool


class StopTrace(Request[TraceTold], frozen=True):
    """End the trace; answered by `TraceTold`, which has the events from `since_ns` on."""

    is_open = True

    since_ns: int


class ResourceDepth(msgspec.Struct, frozen=True):
    """Size of a queue in elements, or of an accumulator in gradients; `capacity` 0 means unbounded."""

    name: str
    size: int
    capacity: int


class TaskUsage(msgspec.Struct, frozen=True):
    """What a task has used since its start: its process's processor, by the kernel's counts, and the network.

    `python_s`    time of Python's threads, in s: Python's code, sending and receiving included, and the XLA programs
                  that run on the thread that calls them, as small ones do
    `other_s`     time of all other threads, in s: those of XLA
    `wakeups`     number of times that a thread of the process gave up its core to wait, and was woken later
    `messages`    number of messages with values that it sent; a message may carry a bundle of several values
    `values`      number of values in them
    `size_bytes`  total size of the values
    `updates`     number of parts of asynchronous steps that changed variables here
    `missed`      number of updates by other steps between such a part's read of the variables and its own update: the
                  sum over all parts
    """

    python_s: float
    other_s: float
    wakeups: int
    messages: int
    values: int
    size_bytes: int
    updates: int = 0
    missed: int = 0


class TaskState(Message, frozen=True):
    """A task's counters since its start, and its present load.

    `steps`    number of steps started by this task that have ended
    `step_s`   running mean duration of successful steps, in s
    `parts`    number of parts of steps that have ended here
    `running`  number of parts running here
    `waiting`  number of values awaited
    `held`     number of values received and not taken yet
    `depths`   its queues and accumulators
    `usage`    None unless requested
    """

    steps: int
    step_s: float
    parts: int
    running: int
    waiting: int
    held: int
    depths: tuple[ResourceDepth, ...] = ()
    usage: TaskUsage | None = None


class GetTaskState(Request[TaskState], frozen=True):
    """Read the task's counters; with `usage` also those of the kernel, which takes some 1 us for each thread."""

    is_open = True

    usage: bool = False
