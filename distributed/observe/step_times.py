"""How the time of traced steps divides at each task, and the messages that a step sends, from the events of a trace.

Each moment of a step at a task counts once, as the first of these that applies:

- XLA: a call of an XLA program is in progress, from the start of its dispatch until its results are computed. The
  dispatch is a call of JAX with a few us of Python around it.
- sending: a thread hands a message to the connection. That is Python's part of the transport, the copy of the values,
  and the kernel's, except for small messages that a reader thread gathers to send them together.
- Python: a thread runs another item of the plan, or nothing that the task waits for is missing. So this has also the
  handling of messages, and the wake-ups of threads and their waits for the interpreter's lock or for a core.
- wire: an awaited value is missing, and a message for the task has left another one and not arrived. The two times are
  of different clocks, so this is as exact as they are aligned.
- waiting: the same without such a message: other tasks compute, or a queue is empty.

The five add up to the time of the step, from its beginning to its end at the task that started it, and of its part at
the other tasks. The values that a task sends to itself are no messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from dflow.distributed.observe.clock_alignment import Offset
from dflow.distributed.observe.message_times import SentMessage, sent_messages
from dflow.distributed.observe.spans import Span, spans
from dflow.lowering.steps.step_events import PART_BEGAN, STEP_BEGAN, Event
from dflow.tracing.devices.task_name import split_task_name

Events = Mapping[str, Sequence[Event]]


class Division(NamedTuple):
    """The time of a step at one task, in us."""

    python: float = 0.0
    xla: float = 0.0
    sending: float = 0.0
    wire: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """Means over the steps of one task, started by tasks of the job `starters`, per step.

    `steps`      number of steps in the trace
    `took_us`    mean duration of the middle half of the steps by duration, so that a few slow steps do not count
    `division`   mean division of the same steps
    `messages`, `values`, `size_bytes`  number of messages with values that the task sent, and their content
    """

    task: str
    starters: str
    steps: int
    took_us: float
    division: Division
    messages: float
    values: float
    size_bytes: float


@dataclass(frozen=True)
class MessageTimes:
    """The messages over one edge, from one task to another.

    `messages`              mean number in a step that uses the edge: more than one in a loop
    `values`, `size_bytes`  means of one message; a message whose number of values the trace has lost counts as 0
    `sending_us`            median time until the sender had handed a message to its connection
    `arrival_us`            median time from the same beginning to the arrival, or None if no arrival was recorded
    """

    edge: str
    source: str
    destination: str
    messages: float
    values: float
    size_bytes: float
    sending_us: float
    arrival_us: float | None


def step_times(events: Events, offsets: Mapping[str, Offset]) -> list[StepTimes]:
    """Return the mean times of steps, a row for each job that starts steps and each task, sorted by both."""
    sent = sent_messages(events)
    found: dict[tuple[str, str], list[_Step]] = defaultdict(list)
    for task, own in events.items():
        for starter, step in _steps_at(task, own, sent, offsets):
            found[split_task_name(starter)[0], task].append(step)
    order = sorted(found, key=lambda key: (key[0], split_task_name(key[1])))
    return [_mean(starters, task, found[starters, task]) for starters, task in order]


def message_times(events: Events, offsets: Mapping[str, Offset]) -> list[MessageTimes]:
    """Return the sizes and times of messages, a row for each edge and pair of tasks, most bytes per step first."""
    found: dict[tuple[str, str, str], list[SentMessage]] = defaultdict(list)
    for message in sent_messages(events):
        found[message.edge, message.source, message.destination].append(message)
    rows = [_of_edge(*key, same, offsets) for key, same in found.items()]
    return sorted(rows, key=lambda row: (-row.messages * row.size_bytes, row.edge, row.source, row.destination))


def _of_edge(
    edge: str, source: str, destination: str, same: Sequence[SentMessage], offsets: Mapping[str, Offset]
) -> MessageTimes:
    arrivals = [
        (one.received.at_ns - offsets[destination].offset_ns - (one.began_ns - offsets[source].offset_ns)) / 1e3
        for one in same
        if one.received is not None
    ]
    return MessageTimes(
        edge,
        source,
        destination,
        len(same) / len({(one.sent.origin, one.sent.step) for one in same}),
        fmean(one.values for one in same),
        fmean(one.sent.size_bytes for one in same),
        median((one.sent.at_ns - one.began_ns) / 1e3 for one in same),
        median(arrivals) if arrivals else None,
    )


#: A step at a task: how its time divides, and the messages that the task sent.
_Step = tuple[Division, list[SentMessage]]


def _mean(starters: str, task: str, steps: list[_Step]) -> StepTimes:
    divisions = sorted((division for division, _ in steps), key=sum)
    quarter = len(steps) // 4
    middle = divisions[quarter : len(steps) - quarter]
    return StepTimes(
        task,
        starters,
        len(steps),
        fmean(map(sum, middle)),
        Division(*map(fmean, zip(*middle, strict=True))),
        fmean(len(sent) for _, sent in steps),
        fmean(sum(one.values for one in sent) for _, sent in steps),
        fmean(sum(one.sent.size_bytes for one in sent) for _, sent in steps),
    )


_StepKey = tuple[str, int]


def _steps_at(
    task: str, own: Sequence[Event], sent: Iterable[SentMessage], offsets: Mapping[str, Offset]
) -> Iterable[tuple[str, _Step]]:
    """Yield the complete steps of a task, each with the task that started it; all times are by the task's clock."""
    of_step: dict[_StepKey, list[Span]] = defaultdict(list)
    for span in spans(own):
        of_step[span.began.origin, span.began.step].append(span)
    outgoing: dict[_StepKey, list[SentMessage]] = defaultdict(list)
    incoming: dict[_StepKey, list[SentMessage]] = defaultdict(list)
    for one in sent:
        if one.source == task:
            outgoing[one.sent.origin, one.sent.step].append(one)
        if one.destination == task and one.received is not None:
            incoming[one.sent.origin, one.sent.step].append(one)
    for key, found in of_step.items():
        whole = _whole(found)
        if whole is not None:
            ahead = {one.source: offsets[task].offset_ns - offsets[one.source].offset_ns for one in incoming[key]}
            activities = _activities(found, whole, outgoing[key], incoming[key], ahead)
            yield key[0], (divide(whole, activities), outgoing[key])


Interval = tuple[int, int]


def _whole(found: Sequence[Span]) -> Interval | None:
    """Return the interval of the step, or of its part if another task started it; None if it is incomplete."""
    for what in (STEP_BEGAN, PART_BEGAN):
        for span in found:
            if span.began.what == what:
                return (span.began.at_ns, span.ended.at_ns) if span.ended is not None else None
    return None


def divide(whole: Interval, activities: Sequence[Sequence[Interval]]) -> Division:
    """Divide the time of a step at a task, in ns, by the activities there, as intervals that may overlap.

    activities  intervals of five kinds, in this order: xla, sending and python, as in the description of this file;
                missing: an awaited value has not arrived, or a part of the step on another task has not ended; flying:
                a message for the task has left another one, and has not arrived
    """
    changes = sorted(
        (min(max(at_ns, whole[0]), whole[1]), kind, change)
        for kind, intervals in enumerate(activities)
        for interval in intervals
        if interval[0] < interval[1]
        for at_ns, change in zip(interval, (1, -1), strict=True)
    )
    total = dict.fromkeys(Division._fields, 0)
    running, last_ns = [0] * len(activities), whole[0]
    for at_ns, kind, change in [*changes, (whole[1], 0, 0)]:
        total[_class_of(*running)] += at_ns - last_ns
        running[kind] += change
        last_ns = at_ns
    return Division(**{name: ns / 1e3 for name, ns in total.items()})


def _class_of(xla: int, sending: int, python: int, missing: int, flying: int) -> str:
    """Return the field of `Division` for a moment, from the number of activities of each kind."""
    if xla:
        return "xla"
    if sending:
        return "sending"
    if python or not missing:
        return "python"
    return "wire" if flying else "waiting"


def _activities(
    found: Sequence[Span],
    whole: Interval,
    outgoing: Iterable[SentMessage],
    incoming: Sequence[SentMessage],
    ahead: Mapping[str, int],
) -> Sequence[Sequence[Interval]]:
    """Return the intervals of XLA, sending, Python, missing values and messages in flight, in this order.

    All times are by the task's clock.

    ahead  ns that the task's clock is ahead of another task's, by that task
    """
    xla, python, missing = [], [], []
    arrived = {one.sent.name: one.received.at_ns for one in incoming if one.received is not None}
    for span in found:
        began_ns, ended_ns = span.began.at_ns, span.ended.at_ns if span.ended is not None else whole[1]
        match span.began.kind:
            case "Call":
                xla.append((began_ns, span.computed.at_ns if span.computed is not None else ended_ns))
                python.append((began_ns, ended_ns))
            case "Send" | "Read" | "Copy" | "CheckIds":
                python.append((began_ns, ended_ns))
            case "UseResource":
                missing.append((began_ns, ended_ns))
            case "Recv":
                missing.append((began_ns, max(began_ns, arrived.get(span.began.name, ended_ns))))
        if span.began.what == PART_BEGAN:
            missing.append((ended_ns, whole[1]))
    sending = [(one.began_ns, one.sent.at_ns) for one in outgoing]
    flying = [(one.began_ns + ahead[one.source], one.received.at_ns) for one in incoming if one.received is not None]
    return xla, sending, python, missing, flying
