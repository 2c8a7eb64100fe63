"""The events of many tasks as one trace for Perfetto and chrome://tracing, in the Trace Event Format.

Each task is a process, with tracks for the steps it started, its parts of steps, the items that its threads run, XLA's
computations, the messages that it sent or received, and its waits. A message has a slice at its sender, from the
beginning of its sending to its arrival, and an arrow to the arrival. The format forbids slices that overlap without
being nested, so such slices go to further tracks of the same name. Times are in us from the first event, by the
tracer's clock: see `clock_alignment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflow.distributed.observe.clock_alignment import Crossing, Offset
from dflow.distributed.observe.message_times import MessageKey, SentMessage, key_of, sent_messages
from dflow.distributed.observe.spans import Span, spans
from dflow.lowering.queues.channel import STEPS_OF_A_LIFE
from dflow.lowering.steps.step_events import (
    CONNECTED,
    CONNECTION_LOST,
    PART_BEGAN,
    RECEIVED,
    ROSTER_CHANGED,
    SENT,
    STEP_BEGAN,
    STEP_ENDED,
    WAIT_EXPIRED,
    Event,
)
from dflow.tracing.devices.task_name import short_task_name, split_task_name

XLA, MESSAGES = "XLA", "messages"
TRACKS = ("steps", "parts of steps", "Python", XLA, MESSAGES, "waits", "branches and loops")
_TRACK_OF_ITEM = {
    "Call": "Python",
    "CheckIds": "Python",
    "Copy": "Python",
    "Read": "Python",
    "Send": "Python",
    "Recv": "waits",
    "UseResource": "waits",
}
_INSTANTS = (CONNECTED, CONNECTION_LOST, ROSTER_CHANGED, WAIT_EXPIRED)
#: Drawn length of an arrival, which has no duration.
_ARRIVAL_NS = 1000

Events = Mapping[str, Sequence[Event]]


def first_steps(events: Events, steps: int | None) -> dict[str, list[Event]]:
    """Return the events of the first `steps` complete steps (None: all) that each task started, and of no step."""
    wanted: set[tuple[str, int]] = set()
    for task, own in events.items():
        began = {event.step for event in own if event.what == STEP_BEGAN and event.origin == task}
        whole = sorted(began & {event.step for event in own if event.what == STEP_ENDED and event.origin == task})
        wanted |= {(task, number) for number in whole[:steps]}
    return {
        task: [event for event in own if not event.origin or (event.origin, event.step) in wanted]
        for task, own in events.items()
    }


def crossings(events: Events) -> list[Crossing]:
    """Return the messages whose sending and arrival were both recorded."""
    return [
        (one.source, one.began_ns, one.destination, one.received.at_ns)
        for one in sent_messages(events)
        if one.received is not None
    ]


def trace_of(events: Events, offsets: Mapping[str, Offset]) -> dict[str, Any]:
    """Return the trace as JSON data; `otherData` has the clocks' offsets and errors."""
    tasks = sorted(events, key=split_task_name)
    times = [
        min(event.at_ns, event.began_ns or event.at_ns) - offsets[task].offset_ns
        for task in tasks
        for event in events[task]
    ]
    start_ns = min(times, default=0)
    messages = {
        key_of(one.source, one.sent): (number, one, _flight_ns(one, offsets))
        for number, one in enumerate(sent_messages(events), 1)
    }
    found: list[dict[str, Any]] = []
    for pid, task in enumerate(tasks, 1):
        found += _of_task(task, pid, start_ns + offsets[task].offset_ns, events[task], messages)
    clocks = {
        short_task_name(task): {
            "ahead of ours by us": offsets[task].offset_ns / 1e3,
            "give or take us": offsets[task].error_ns / 1e3,
        }
        for task in tasks
    }
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}


def _flight_ns(message: SentMessage, offsets: Mapping[str, Offset]) -> int:
    """Return the time from the beginning of the sending to its end, or to the arrival if that is later."""
    sending_ns = message.sent.at_ns - message.began_ns
    if message.received is None:
        return sending_ns
    ahead_ns = offsets[message.destination].offset_ns - offsets[message.source].offset_ns
    return max(message.received.at_ns - ahead_ns - message.began_ns, sending_ns)


#: A message with its number in the trace, and the time that it took, in ns.
_DrawnMessage = tuple[int, SentMessage, int]


@dataclass(frozen=True)
class _Slice:
    track: str
    name: str
    start_ns: int
    end_ns: int
    about: Mapping[str, Any]
    #: The end of an arrow, at the start of the slice.
    arrow: Mapping[str, Any] | None = None


def _of_task(
    task: str, pid: int, zero_ns: int, events: Sequence[Event], messages: Mapping[MessageKey, _DrawnMessage]
) -> list[dict[str, Any]]:
    """Return the trace of one task.

    pid      number of the task in the trace, shown as its process; no process id
    zero_ns  start of the whole trace by the task's clock
    """

    def at(at_ns: int, tid: int) -> dict[str, Any]:
        return {"ts": (at_ns - zero_ns) / 1e3, "pid": pid, "tid": tid}

    def meta(what: str, tid: int, **about: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": about}

    last_ns = max((event.at_ns for event in events), default=0)
    drawn = [_slice_of_message(task, event, messages) for event in events if event.what in (SENT, RECEIVED)]
    lanes = _in_lanes([*(each for span in spans(events) for each in _slices_of(span, last_ns)), *drawn])
    found = [meta("process_name", 0, name=short_task_name(task)), meta("process_sort_index", 0, sort_index=pid)]
    for tid, (track, slices) in enumerate(lanes, 1):
        found += [meta("thread_name", tid, name=track), meta("thread_sort_index", tid, sort_index=tid)]
        for each in slices:
            took_us = (each.end_ns - each.start_ns) / 1e3
            about = {"name": each.name, "cat": track, "ph": "X", "dur": took_us, "args": dict(each.about)}
            found.append({**about, **at(each.start_ns, tid)})
            if each.arrow:
                found.append({**each.arrow, **at(each.start_ns, tid)})
    for event in events:
        if event.what in _INSTANTS:
            said = ": ".join(text for text in (event.what, short_task_name(event.peer), event.text) if text)
            found.append({"name": said, "cat": "cluster", "ph": "i", "s": "p", **at(event.at_ns, 0)})
    return found


def _slice_of_message(task: str, event: Event, messages: Mapping[MessageKey, _DrawnMessage]) -> _Slice:
    """Return the slice for the way of a message that the task sent, or for an arrival there."""
    is_sent = event.what == SENT
    about: dict[str, Any] = {"step": _step(event), "message": event.name, "bytes": event.size_bytes}
    arrow = None
    began_ns = event.began_ns or event.at_ns
    length_ns = event.at_ns - began_ns if is_sent else _ARRIVAL_NS
    if (found := messages.get(key_of(task, event))) is not None:
        number, message, flight_ns = found
        if message.values:
            about["values"] = message.values
        if message.received is not None:
            way = {"ph": "s"} if is_sent else {"ph": "f", "bp": "e"}
            arrow = {"name": event.name, "cat": MESSAGES, "id": number, **way}
        if is_sent:
            about["sending us"] = length_ns / 1e3
            length_ns = flight_ns
    name = f"{event.name} {'to' if is_sent else 'from'} {short_task_name(event.peer)}"
    return _Slice(MESSAGES, name, began_ns, began_ns + length_ns, about, arrow)


def _slices_of(span: Span, last_ns: int) -> list[_Slice]:
    """Return the slice of a span; of a call, also that of the computation, which includes the dispatch."""
    began, ended = span.began, span.ended
    end_ns = max(ended.at_ns if ended is not None else last_ns, began.at_ns)
    about: dict[str, Any] = {"step": _step(began)}
    if ended is None:
        about["goes on"] = True
    elif ended.text:
        about["error"] = ended.text
    if began.what in (STEP_BEGAN, PART_BEGAN):
        return [_Slice(TRACKS[began.what == PART_BEGAN], _step(began), began.at_ns, end_ns, about)]
    if began.line:
        about["line"] = began.line
    if began.values:
        about["values"] = began.values
    if began.kind != "Call":
        return [_Slice(_TRACK_OF_ITEM.get(began.kind, TRACKS[-1]), _item(began), began.at_ns, end_ns, about)]
    dispatch = _Slice("Python", f"dispatch {_item(began)}", began.at_ns, end_ns, about)
    computed_ns = max(span.computed.at_ns, began.at_ns) if span.computed is not None else end_ns
    return [dispatch, _Slice(XLA, _item(began), began.at_ns, computed_ns, about)]


def _item(event: Event) -> str:
    verb = {"Send": "send to", "Recv": "wait for"}.get(event.kind) if event.peer else ""
    who = f" {verb} {short_task_name(event.peer)}" if verb else ""
    return f"{event.name or event.kind}{who}"


def _step(event: Event) -> str:
    return f"step {event.step % STEPS_OF_A_LIFE} of {short_task_name(event.origin)}"


def _in_lanes(slices: Iterable[_Slice]) -> list[tuple[str, list[_Slice]]]:
    """Return the tracks in order with their slices; a track is repeated so that its slices overlap only when nested."""
    lanes: list[tuple[str, list[_Slice]]] = []
    for track in TRACKS:
        rows: list[tuple[list[int], list[_Slice]]] = []
        wanted = sorted((each for each in slices if each.track == track), key=lambda s: (s.start_ns, -s.end_ns))
        for each in wanted:
            row = next((row for row in rows if _fits(row[0], each)), None)
            if row is None:
                row = ([], [])
                rows.append(row)
            row[0].append(each.end_ns)
            row[1].append(each)
        lanes += [(track, row) for _, row in rows]
    return lanes


def _fits(ends: list[int], each: _Slice) -> bool:
    """Whether the slice fits a row: after its open slices, or inside the innermost. Drops past ones of `ends`."""
    while ends and ends[-1] <= each.start_ns:
        ends.pop()
    return not ends or each.end_ns <= ends[-1]
